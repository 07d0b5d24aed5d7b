"""Of each step every rank selects the rows of its part, and together they have all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.execution.batch.own_rows import OwnRows
from gpu_worker.execution.batch.step_table import HostStep, StepArrays
from gpu_worker.execution.batch.transfers import Upload

CPU = torch.device("cpu")


def step_of(lengths: list[int]) -> HostStep:
    """A step whose tokens have different numbers in each array."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens, rows = np.arange(starts[-1], dtype=np.int64), np.arange(len(lengths), dtype=np.int64) + 10
    token_rows, contexts = np.repeat(rows, lengths), np.array(lengths, dtype=np.int32) + 5
    arrays = (tokens + 100, token_rows, tokens + 200, tokens + 300, rows, starts, contexts)
    return StepArrays(*arrays, max_query_len=max(lengths), max_context_len=int(contexts.max()))


@given(
    shares=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=6), is_copied=st.booleans()
)
def test_ranks_have_each_row_once(shares: list[tuple[int, int]], is_copied: bool) -> None:
    lengths, parts = [length for length, _ in shares], np.array([part for _, part in shares])
    step, places = step_of(lengths), []
    for rank in range(3):
        upload = Upload(CPU, is_copied=is_copied)
        upload.add(np.zeros(1, dtype=np.int64))
        own = OwnRows(step, parts == rank, upload)
        upload.send()
        mine = own._places.tensor.numpy()
        places += mine.tolist()
        if own.layout is None:
            assert not (parts == rank).any()
            continue
        check(own.layout, step, parts == rank, mine)
    assert sorted(places) == list(range(sum(lengths)))


def check(own: HostStep, step: HostStep, is_own: npt.NDArray[np.bool_], places: npt.NDArray[np.int64]) -> None:
    assert own.rows.tolist() == step.rows[is_own].tolist()
    assert own.context_lens.tolist() == step.context_lens[is_own].tolist()
    assert (np.diff(own.query_starts) == np.diff(step.query_starts)[is_own]).all()
    assert own.query_starts[0] == 0
    for name in ("token_ids", "token_rows", "positions", "slots"):
        assert getattr(own, name).tolist() == getattr(step, name)[places].tolist()
    assert own.max_query_len == np.diff(own.query_starts).max()
    assert own.max_context_len == own.context_lens.max()


@pytest.mark.parametrize("is_copied", [False, True])
def test_rank_without_rows_has_no_layout(is_copied: bool) -> None:
    upload = Upload(CPU, is_copied=is_copied)
    upload.add(np.zeros(3, dtype=np.int32))
    own = OwnRows(step_of([1, 1]), np.array([False, False]), upload)
    upload.send()
    assert own.layout is None
    assert own._places.tensor.shape == (0,)
