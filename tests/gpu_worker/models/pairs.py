"""One checkpoint per variant and test run: saving and loading costs more than computing."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def pair_maker(
    tmp_path_factory: pytest.TempPathFactory, save: Callable[[str, Path], Any] = save_variant
) -> Callable[[str], Pair]:
    """Return a function that makes the pair of what `save` saves under a name, once."""

    @functools.cache
    def make(name: str) -> Pair:
        directory = tmp_path_factory.mktemp(name)
        oracle = save(name, directory)
        return Pair(directory, oracle, load_model(directory, torch.float32, CPU))

    return make
