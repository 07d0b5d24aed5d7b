"""One file per variant and test run: writing and loading costs more than computing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gpu_worker.quantization.gguf.gguf_models import write_model


class GGUFPair(NamedTuple):
    """A file, and the oracle's model of it."""

    path: Path
    oracle: Any


@pytest.fixture(scope="session")
def gguf_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GGUFPair]:
    """Make the pair of a variant: `gguf_pair("llama-Q8_0")`. Tests must not change its file."""

    @functools.cache
    def make(name: str) -> GGUFPair:
        path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        return GGUFPair(path, write_model(path, name))

    return make
