"""One checkpoint per variant and test run: saving and loading costs more than computing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.variants import save_variant

CPU = torch.device("cpu")


class Pair(NamedTuple):
    """A checkpoint, the oracle's model of it, and ours."""

    directory: Path
    oracle: Any
    model: CausalLM


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: these models are too small for a second one to do anything but wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Make the pair of a variant: `pair_of("llama")`. Tests must not change its directory."""

    @functools.cache
    def make(name: str) -> Pair:
        directory = tmp_path_factory.mktemp(name)
        oracle = save_variant(name, directory)
        return Pair(directory, oracle, load_model(directory, torch.float32, CPU))

    return make
