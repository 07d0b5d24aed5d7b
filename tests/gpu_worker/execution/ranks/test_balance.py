"""Places for experts: each has one, a rank none twice, few change at a time, and ranks get about as many tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.execution.ranks.balance import better_places, rank_loads


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
