"""A group whose busiest experts are at one rank moves them, while it answers as one process, also when a rank dies.

Where they go: each has a place, a rank none twice, few change at a time, and ranks get about as many tokens.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gpu_worker.execution.ranks.rebalancing import better_places, rank_loads
from gpu_worker.execution.ranks.runner import GroupRunner
from gpu_worker.layers.ranks.experts import PlacedExperts
from tests.gpu_worker.execution.ranks.group_run import Run, started
from tests.gpu_worker.execution.ranks.test_group import assert_same, begin, replace_rank, sequences
from tests.gpu_worker.execution.ranks.test_same_tokens import SIZES
from tests.gpu_worker.quantization.test_mxfp4 import CASE, Case, save_packed
from tests.waiting import wait_for

ALONE: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 256}
SETTINGS: Mapping[str, Any] = {
    **ALONE,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "num_redundant_experts": 2,
    "eplb_step_interval": 20,
}


def save_skewed(directory: Path) -> None:
    """Save a model of eight experts whose router prefers three that rank 0 has alone."""
    save_packed(directory, Case("GptOss", {**CASE.options, **SIZES, "num_local_experts": 8}))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("router.bias"):
            tensor += torch.tensor([0, 0, 6.0, 5.0, 4.0, 0, 0, 0])
    save_file(tensors, path)


def busiest_share(run: Run, places: list[tuple[int, ...]]) -> float:
    """Return which share of all tokens so far the busiest rank of a layer would have with these places."""
    loads = run.own.model.expert_loads()
    assert loads is not None
    counted = [layer.double().numpy() for layer in loads.by_layer()]
    return max(rank_loads(own, layer, 2).max() / layer.sum() for own, layer in zip(places, counted, strict=True))


def steps_of(run: Run) -> Iterator[None]:
    """Compute one long answer after another."""
    while True:
        yield from itertools.islice(begin(run), 120)


def step_until(run: Run, condition: Callable[[], object]) -> None:
    steps = steps_of(run)
    wait_for(lambda: next(steps) or condition())


def places_of(run: Run) -> list[tuple[int, ...]]:
    return [experts.places for experts in run.own.model.placed_experts]


def num_moved(run: Run) -> int:
    assert isinstance(run.runner, GroupRunner)
    assert run.runner.rebalancing is not None
    return run.runner.rebalancing.num_moved


def refuse(experts: PlacedExperts, places: tuple[int, ...]) -> Mapping[int, Any]:
    raise MemoryError("no room")


def initial(num_experts: int, redundant: int) -> tuple[int, ...]:
    return tuple(place % num_experts for place in range(num_experts + redundant))


def by_hand(places: tuple[int, ...], tokens: list[float], size: int) -> list[float]:
    """Give each token of an expert to its places by turns."""
    loads, count = [0.0] * size, len(places) // size
    for place, expert in enumerate(places):
        loads[place // count] += tokens[expert] / places.count(expert)
    return loads


@given(
    shape=st.sampled_from([(4, 0, 2), (4, 2, 2), (6, 3, 3), (8, 8, 4), (5, 1, 2), (4, 8, 4), (4, 4, 2)]),
    tokens=st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    changes=st.integers(1, 4),
)
def test_every_expert_has_a_place_and_no_change_makes_ranks_less_even(
    shape: tuple[int, int, int], tokens: list[int], changes: int
) -> None:
    num_experts, redundant, size = shape
    counted = np.array(tokens[:num_experts], dtype=np.float64)
    places = initial(num_experts, redundant)
    for _ in range(20):
        found = better_places(places, counted, size, changes)
        assert set(found) == set(range(num_experts))
        assert all(len(set(own)) == len(own) for own in np.reshape(found, (size, -1)).tolist())
        assert sum(one != other for one, other in zip(places, found, strict=True)) <= changes
        loads, before = (by_hand(each, counted.tolist(), size) for each in (found, places))
        assert rank_loads(found, counted, size) == pytest.approx(loads)
        assert sum(load**2 for load in loads) <= sum(load**2 for load in before) * (1 + 1e-9)
        if found == places:
            return
        places = found
    raise AssertionError("experts move again and again for the same load")


@pytest.mark.parametrize(
    ("num_experts", "redundant", "size", "most"), [(8, 0, 2, 1.06), (8, 2, 2, 1.01), (64, 8, 4, 1.05)]
)
def test_a_skewed_load_falls_on_all_ranks_alike(num_experts: int, redundant: int, size: int, most: float) -> None:
    # The busiest ones stand together at the first rank.
    tokens, places = 1 / np.arange(1.0, num_experts + 1), initial(num_experts, redundant)
    before = rank_loads(places, tokens, size)
    for _ in range(5):
        places = better_places(places, tokens, size, 8)
    loads = rank_loads(places, tokens, size)
    assert before.max() > before.mean() * (most + 0.1)
    assert loads.max() < loads.mean() * most


@pytest.mark.parametrize("context_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_busy_experts_move_and_answers_stay_the_same(
    context_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_skewed(tmp_path)
    with started(tmp_path, 1, **ALONE) as (alone, _):
        expected = alone.answer(sequences())
    with started(tmp_path, 2, **SETTINGS, decode_context_parallel_size=context_size) as (run, group):
        assert group is not None
        before = places_of(run)
        assert before[0] == (0, 1, 2, 3, 4, 5, 6, 7, 0, 1)
        # What a rank cannot read stays where it is.
        with monkeypatch.context() as patch:
            patch.setattr(PlacedExperts, "prepare", refuse)
            step_until(run, lambda: "experts stay where they are" in caplog.messages)
            assert (places_of(run), group.lost) == (before, None)
        step_until(run, lambda: num_moved(run) >= 4)
        assert_same(run.answer(sequences()), expected)
        assert busiest_share(run, before) > 0.85
        assert busiest_share(run, places_of(run)) < 0.7
        # Another process takes the places that experts have by now.
        moved = places_of(run)
        assert moved != before
        replace_rank(run, group, 1, signal.SIGKILL)
        assert_same(run.answer(sequences()), expected)


@pytest.mark.slow
def test_rank_that_dies_while_experts_move_costs_no_answer_and_no_step_waits_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_skewed(tmp_path)
    with started(tmp_path, 1, **ALONE) as (alone, _):
        expected = alone.answer(sequences())
    reads, may_read, own = threading.Event(), threading.Event(), PlacedExperts.prepare

    def prepare(experts: PlacedExperts, places: tuple[int, ...]) -> Mapping[int, Any]:
        reads.set()
        assert may_read.wait(60)
        return own(experts, places)

    monkeypatch.setattr(PlacedExperts, "prepare", prepare)
    with started(tmp_path, 2, **SETTINGS) as (run, group):
        assert group is not None
        step_until(run, reads.is_set)
        # Rank 1 has read its part, rank 0 reads: steps are computed all the same.
        for _ in itertools.islice(steps_of(run), 30):
            pass
        assert num_moved(run) == 0
        timer = threading.Timer(2.0, may_read.set)
        timer.start()
        replace_rank(run, group, 1, signal.SIGKILL)
        timer.join()
        assert_same(run.answer(sequences()), expected)
        step_until(run, lambda: num_moved(run) >= 2)
        assert_same(run.answer(sequences()), expected)
