"""Tokens that a request forbids: `allowed_token_ids`, `bad_words`, `min_tokens`; together, and behind drafts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from shared.sampling import Sampling
from tests.gpu_worker.execution.sampling.sampler_run import SamplerRun, forbidden_tokens

VOCAB_SIZE = 70
PROMPT = [1, 2, 3]
Tokens = st.integers(0, VOCAB_SIZE - 1)
# A few tokens, so that runs of several occur.
Few = st.integers(0, 4)


def make_sequence(
    sampling: Sampling, output: list[int], end_ids: set[int], bad_words: list[tuple[int, ...]], name: str = "s"
) -> Sequence:
    sequence = Sequence(name, [*PROMPT, *output], len(PROMPT), sampling, max_tokens=1000)
    sequence.stop_ids, sequence.bad_words = frozenset(end_ids), tuple(bad_words)
    return sequence


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def best(logits: torch.Tensor, forbidden: set[int]) -> int:
    return int(logits.index_fill(0, torch.tensor(sorted(forbidden), dtype=torch.int64), -math.inf).argmax())


@st.composite
def asked(draw: st.DrawFn) -> tuple[Sampling, list[int], set[int], list[tuple[int, ...]]]:
    words = draw(st.lists(st.lists(Few, min_size=1, max_size=3).map(tuple), max_size=3))
    allowed = draw(st.none() | st.sets(Tokens, min_size=8, max_size=30))
    sampling = Sampling(
        temperature=0.0,
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=("x",) * len(words),
        min_tokens=draw(st.integers(0, 6)),
        logit_bias=draw(st.dictionaries(Tokens, st.sampled_from([-5.0, 5.0]), max_size=2)),
    )
    return sampling, draw(st.lists(Few, max_size=6)), draw(st.sets(Tokens, max_size=4)), words


@settings(max_examples=60)
@given(everyone=st.lists(asked(), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_best_token_that_is_not_forbidden_is_chosen_in_a_mixed_batch(
    everyone: list[tuple[Sampling, list[int], set[int], list[tuple[int, ...]]]], seed: int
) -> None:
    logits = random_logits(len(everyone), seed)
    sequences = [make_sequence(*one, name=str(row)) for row, one in enumerate(everyone)]
    sampled = SamplerRun(VOCAB_SIZE).sample(logits, sequences)
    for row, (sampling, output, end_ids, words) in enumerate(everyone):
        adjusted = logits[row].clone()
        for token_id, bias in sampling.logit_bias.items():
            adjusted[token_id] += bias
        expected = best(adjusted, forbidden_tokens(sampling, output, end_ids, words, VOCAB_SIZE))
        assert sampled[row].token_ids == (expected,)


@settings(max_examples=60)
@given(one=asked(), count=st.integers(1, 4), seed=st.integers(0, 99), num_right=st.integers(0, 4))
def test_behind_drafts_the_same_tokens_are_forbidden_as_without_them(
    one: tuple[Sampling, list[int], set[int], list[tuple[int, ...]]], count: int, seed: int, num_right: int
) -> None:
    output = one[1]
    logits = random_logits(count + 1, seed)
    alone, run = make_sequence(*one), SamplerRun(VOCAB_SIZE)
    for row in range(count + 1):
        alone.token_ids += run.sample(logits[row : row + 1], [alone])[0].token_ids
    right = alone.token_ids[len(PROMPT) + len(output) :]
    drafts = tuple(right[:num_right][:count])
    drafts += tuple((token_id + 1) % VOCAB_SIZE for token_id in right[len(drafts) : count])
    [verified] = SamplerRun(VOCAB_SIZE).verify(logits, [make_sequence(*one)], [Draft(drafts)])
    num_accepted = min(num_right, count)
    assert verified.token_ids == tuple(right[: num_accepted + 1])


def test_end_is_allowed_as_soon_as_the_output_is_long_enough() -> None:
    least = Sampling(temperature=0.0, min_tokens=2)
    sequences = [make_sequence(least, [0] * length, {7}, [], str(length)) for length in (1, 2)]
    logits = random_logits(2, 0)
    logits[:, 7] = logits.max() + 1
    one_short, enough = [tokens.token_ids for tokens in SamplerRun(VOCAB_SIZE).sample(logits, sequences)]
    assert one_short == (best(logits[0], {7}),)
    assert enough == (7,)


def test_end_stays_allowed_where_nothing_else_is() -> None:
    end = 7
    sampling = Sampling(temperature=0.0, min_tokens=5, allowed_token_ids=(end,))
    sequences = [make_sequence(sampling, [], {end}, [], "a"), make_sequence(Sampling(min_tokens=5), [], {end}, [], "b")]
    only_end = torch.full((2, VOCAB_SIZE), -math.inf)
    only_end[:, end] = 1.0
    assert [tokens.token_ids for tokens in SamplerRun(VOCAB_SIZE).sample(only_end, sequences)] == [(end,), (end,)]


@pytest.mark.parametrize("name", ["min_tokens", "allowed_token_ids", "bad_words"])
def test_invalid_logits_stay_invalid(name: str) -> None:
    asked = {"min_tokens": 3, "allowed_token_ids": (1, 2), "bad_words": ("x",)}[name]
    sequence = make_sequence(Sampling(**{name: asked}), [], {4}, [(5,)])
    logits = random_logits(1, 0)
    logits[0, 1] = math.nan
    [sampled] = SamplerRun(VOCAB_SIZE).sample(logits, [sequence])
    assert sampled.token_ids == ()
    assert "logits" in (sampled.error or "")


def test_word_that_begins_in_the_prompt_is_not_forbidden() -> None:
    sampling = Sampling(temperature=0.0, bad_words=("x",))
    logits = random_logits(1, 3)
    likely = int(logits.argmax())
    word = (PROMPT[-1], likely)
    sampled = SamplerRun(VOCAB_SIZE).sample(logits, [make_sequence(sampling, [], set(), [word])])
    assert sampled[0].token_ids == (likely,)
    after = SamplerRun(VOCAB_SIZE).sample(logits, [make_sequence(sampling, [PROMPT[-1]], set(), [word])])
    assert after[0].token_ids != (likely,)
