from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu_worker.models.pairs import Pair, pair_maker


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
    return pair_maker(tmp_path_factory)
