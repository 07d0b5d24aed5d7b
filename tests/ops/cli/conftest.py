from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.system import System, running_system


@pytest.fixture(scope="package")
def cli_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The whole system with a simulated engine, for commands that talk to it."""
    with running_system(tmp_path_factory.mktemp("cli"), "--simulate", "5") as running:
        yield running


@pytest.fixture(scope="package")
def state_dir(cli_system: System) -> Path:
    return cli_system.ready_file.parent / "state"
