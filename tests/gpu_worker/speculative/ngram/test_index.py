from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.speculative.ngram.index import BYTES_PER_TOKEN, MATCH_TOKENS, RunIndex


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9), st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_ends_are_all_places_where_the_run_occurs_the_latest_first(text: list[int], step: int, run: list[int]) -> None:
    index = RunIndex(text)
    while index.extend(step):
        pass
    assert index.num_indexed == len(text)
    places = [end for end in range(MATCH_TOKENS - 1, len(text)) if text[end + 1 - MATCH_TOKENS : end + 1] == run]
    assert list(index.ends(run)) == places[::-1]


@pytest.mark.parametrize("num_tokens", [1_000, 22_000, 44_000, 100_000])
def test_index_takes_no_more_memory_than_is_counted(num_tokens: int) -> None:
    generator = random.Random(1)
    text = [generator.randrange(1 << 20) for _ in range(num_tokens)]
    # The smallest of three: threads of the process take memory too.
    peak = min(_peak_of_index(text) for _ in range(3))
    assert 0.3 * BYTES_PER_TOKEN * num_tokens < peak < BYTES_PER_TOKEN * num_tokens


def _peak_of_index(text: list[int]) -> int:
    tracemalloc.start()
    index = RunIndex(text)
    while index.extend(500):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
