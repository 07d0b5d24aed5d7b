from collections.abc import Iterator

import pytest

from tests.integration.system import System, running_system


@pytest.fixture(scope="package")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The whole system with the demo model: one gateway, one worker."""
    with running_system(tmp_path_factory.mktemp("system")) as running:
        yield running


@pytest.fixture(scope="package")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The whole system with a simulated engine, 5 ms a step: fast, deterministic, and no model."""
    with running_system(tmp_path_factory.mktemp("simulated"), "--simulate", "5") as running:
        yield running
