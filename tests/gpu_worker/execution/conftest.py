from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.models.decoder import CausalLM
from tests.gpu_worker.execution.device_runs import DEVICES, load
from tests.gpu_worker.execution.engine_run import save_tiny_model
from tests.gpu_worker.execution.tiered_engine import OPENED, Models
from tests.gpu_worker.models.conftest import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny model: its directory, which tests must not change, and the model of `transformers`."""
    directory = tmp_path_factory.mktemp("tiny-model")
    return directory, save_tiny_model(directory)


@pytest.fixture(scope="session")
def directory(tiny: tuple[Path, Any]) -> Path:
    return tiny[0]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory)


@pytest.fixture(autouse=True)
def closed_tiers() -> Iterator[None]:
    yield
    OPENED.close()


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, directory: Path) -> CausalLM:
    return load(directory, request.param)
