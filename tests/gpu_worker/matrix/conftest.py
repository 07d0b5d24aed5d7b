from __future__ import annotations

import pytest

from tests.gpu_worker.matrix.parts import Models, save_models
from tests.gpu_worker.matrix.traffic import Oracle
from tests.gpu_worker.models.conftest import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def oracle(models: Models) -> Oracle:
    return Oracle(models)
