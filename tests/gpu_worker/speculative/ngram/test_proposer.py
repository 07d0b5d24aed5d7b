from __future__ import annotations

import itertools
import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.drafts.proposer import DraftRequest
from gpu_worker.speculative.ngram.proposer import (
    BYTES_PER_TOKEN,
    MATCH_TOKENS,
    MAX_INDEXED_TOKENS,
    NgramProposer,
    RunIndex,
)
from shared.sampling import Sampling

MANY = 1 << 20


def make_sequence(prompt: list[int], output: tuple[int, ...] = (), prediction: tuple[int, ...] = ()) -> Sequence:
    return Sequence("s", [*prompt, *output], len(prompt), Sampling(), 100, prediction=prediction)


def draft_of(sequence: Sequence, count: int, proposer: NgramProposer | None = None) -> tuple[int, ...]:
    [draft] = (proposer or NgramProposer(MANY)).propose([DraftRequest(sequence, count)])
    return draft.token_ids


def slow_draft(text: list[int], count: int) -> set[tuple[int, ...]]:
    """What follows the longest earlier occurrences of the text's end, the text going on with the draft itself."""
    lengths = {
        end: next(n for n in range(end + 2) if n > end or text[end - n] != text[len(text) - 1 - n])
        for end in range(len(text) - 1)
    }
    longest = max(lengths.values(), default=0)
    if longest < MATCH_TOKENS:
        return {()}
    drafts = set()
    for end, length in lengths.items():
        if length == longest:
            whole = list(text)
            for offset in range(count):
                whole.append(whole[end + 1 + offset])
            drafts.add(tuple(whole[len(text) :]))
    return drafts


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6))
def test_draft_follows_a_longest_earlier_occurrence(text: list[int], count: int) -> None:
    occurrences = sum(text[i : i + 3] == text[-3:] for i in range(len(text) - 3))
    if occurrences <= 16:
        assert draft_of(make_sequence(text), count) in slow_draft(text, count)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=60), st.integers(1, 9))
def test_index_that_grew_with_the_text_is_like_a_new_one(text: list[int], step: int) -> None:
    sequence, proposer = make_sequence(text[:4]), NgramProposer(MANY)
    for end in range(4, len(text), step):
        sequence.token_ids += text[len(sequence.token_ids) : end]
        assert draft_of(sequence, 5, proposer) == draft_of(sequence, 5)


def test_nothing_is_drafted_where_nothing_repeats() -> None:
    assert draft_of(make_sequence(list(range(50))), 5) == ()
    assert draft_of(make_sequence([1]), 5) == ()


def test_longer_match_wins_over_a_later_one() -> None:
    text = [9, 1, 2, 3, 4, 50, 8, 2, 3, 4, 60, 9, 1, 2, 3, 4]
    assert draft_of(make_sequence(text), 1) == (50,)


def test_text_in_circles_goes_on_in_circles() -> None:
    assert draft_of(make_sequence([7, 8, 9, 7, 8, 9]), 7) == (7, 8, 9, 7, 8, 9, 7)


def test_prediction_is_followed_from_the_first_token_and_found_again_later() -> None:
    prediction = tuple(range(100, 120))
    assert draft_of(make_sequence([1, 2, 3, 4], (100,), prediction), 4) == (101, 102, 103, 104)
    departed = (100, 101, 55, 56, 110, 111, 112)
    assert draft_of(make_sequence([1, 2, 3, 4], departed, prediction), 4) == (113, 114, 115, 116)
    assert draft_of(make_sequence([1, 2, 3, 4], (117, 118, 119), prediction), 4) == ()
    assert draft_of(make_sequence([1, 2, 3, 4], (7,), prediction), 4) == ()


def test_forgotten_sequence_may_come_back_otherwise() -> None:
    proposer, sequence = NgramProposer(MANY), make_sequence([1, 2, 3, 4, 1, 2, 3])
    assert draft_of(sequence, 1, proposer) == (4,)
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert proposer.num_left == MANY
    sequence.token_ids[:] = [1, 2, 3, 5, 1, 2, 3]
    assert draft_of(sequence, 1, proposer) == (5,)


def test_long_text_of_few_tokens_stays_fast() -> None:
    generator = random.Random(1)
    sequence, proposer = make_sequence([generator.randrange(2) for _ in range(100_000)]), NgramProposer(MANY)
    draft_of(sequence, 5, proposer)
    started = time.process_time()
    for _ in range(200):
        sequence.token_ids.append(generator.randrange(2))
        draft_of(sequence, 5, proposer)
    assert (time.process_time() - started) / 200 < 0.002


def test_long_prompts_are_indexed_over_several_steps_and_what_is_indexed_is_found() -> None:
    early = make_sequence([5, 6, 7, 8, *range(1000, 1000 + 5 * MAX_INDEXED_TOKENS), 5, 6, 7])
    late = make_sequence([*range(1000, 1000 + 5 * MAX_INDEXED_TOKENS), 5, 6, 7, 8, 0, 5, 6, 7])
    proposer, num_left, num_steps = NgramProposer(MANY), [MANY], 0
    while not (drafts := proposer.propose([DraftRequest(early, 1), DraftRequest(late, 1)]))[1]:
        assert drafts[0].token_ids == (8,)
        num_left.append(proposer.num_left)
        num_steps += 1
    assert drafts[1].token_ids == (8,)
    assert num_steps == (len(early.token_ids) + len(late.token_ids)) // MAX_INDEXED_TOKENS
    assert {before - after for before, after in itertools.pairwise(num_left)} == {MAX_INDEXED_TOKENS}


def test_no_more_is_indexed_than_there_is_memory_for_until_a_sequence_is_forgotten() -> None:
    first, second = make_sequence([1, 2, 3, 4, 1, 2, 3]), make_sequence([1, 2, 3, 4, 1, 2, 3])
    proposer = NgramProposer(7)
    assert draft_of(first, 1, proposer) == (4,)
    assert draft_of(second, 1, proposer) == ()
    proposer.forget(first)
    assert draft_of(second, 1, proposer) == (4,)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9), st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_ends_are_all_places_where_the_run_occurs_the_latest_first(text: list[int], step: int, run: list[int]) -> None:
    index = RunIndex(text)
    while index.extend(step):
        pass
    assert index.num_indexed == len(text)
    places = [end for end in range(MATCH_TOKENS - 1, len(text)) if text[end + 1 - MATCH_TOKENS : end + 1] == run]
    assert list(index.ends(run)) == places[::-1]


@pytest.mark.parametrize("num_tokens", [1_000, 44_000])
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
