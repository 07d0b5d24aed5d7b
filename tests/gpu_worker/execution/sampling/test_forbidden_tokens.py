"""Tokens that a request forbids: `allowed_token_ids`, `bad_words`, `min_tokens`; together, and behind drafts.

Watermarked sequences: one text whatever the batch, the drafts and the worker; loops as without; others untouched.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from ops.watermark import detect, scored_places
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


WATERMARKS_VOCAB_SIZE = 90
WATERMARKS_PROMPT = [5, 6, 7, 8, 9]
KEY = "0f" * 32
MARKED = Sampling(seed=3, top_p=0.95, watermark=KEY)
PLAIN = Sampling(seed=3, top_p=0.95)


def logits_behind(token_ids: list[int]) -> torch.Tensor:
    """Stand for a model: logits that depend on the last token and the number of tokens."""
    seed = token_ids[-1] * 1009 + len(token_ids)
    return torch.randn(1, WATERMARKS_VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


def watermarks_make_sequence(sampling: Sampling, output: tuple[int, ...] = (), name: str = "s") -> Sequence:
    return Sequence(name, [*WATERMARKS_PROMPT, *output], len(WATERMARKS_PROMPT), sampling, max_tokens=1000)


def written(sampling: Sampling, length: int, output: tuple[int, ...] = ()) -> list[int]:
    """Return an output of `length` tokens that goes on from `output`, by a sampler that knows no other sequence."""
    run, sequence = SamplerRun(WATERMARKS_VOCAB_SIZE), watermarks_make_sequence(sampling, output)
    while sequence.num_output_tokens < length:
        sequence.token_ids.append(run.sample(logits_behind(sequence.token_ids), [sequence])[0].token_ids[0])
    return sequence.token_ids[len(WATERMARKS_PROMPT) :]


def test_marked_text_is_found_by_its_key_and_by_no_other() -> None:
    text = written(MARKED, 150)
    assert detect(text, bytes.fromhex(KEY)).log10_p < -10
    assert detect(text, bytes(32)).log10_p > -4
    assert detect(written(PLAIN, 150), bytes.fromhex(KEY)).log10_p > -4


def test_first_tokens_are_those_of_the_seed() -> None:
    assert written(MARKED, 4) == written(PLAIN, 4)
    assert written(MARKED, 60) != written(PLAIN, 60)
    other = Sampling(seed=4, top_p=0.95, watermark=KEY)
    assert written(other, 60) != written(MARKED, 60)


def test_text_that_moves_goes_on_as_if_it_had_stayed() -> None:
    whole = written(MARKED, 60)
    for moved_at in (1, 4, 5, 33):
        assert written(MARKED, 60, tuple(whole[:moved_at])) == whole


def test_drafts_change_nothing() -> None:
    whole = written(MARKED, 60)
    run, sequence = SamplerRun(WATERMARKS_VOCAB_SIZE), watermarks_make_sequence(MARKED)
    while (num_known := sequence.num_output_tokens) < 60:
        # Two drafts are right and the third is wrong.
        right = whole[num_known : num_known + 2]
        draft = (*right, (whole[num_known + 2] + 1) % WATERMARKS_VOCAB_SIZE) if num_known + 2 < 60 else tuple(right)
        rows = [logits_behind([*sequence.token_ids, *draft[:depth]]) for depth in range(len(draft) + 1)]
        sampled = run.verify(torch.cat(rows), [sequence], [Draft(draft)])[0]
        sequence.token_ids += sampled.token_ids
    assert sequence.token_ids[len(WATERMARKS_PROMPT) :][:60] == whole


def test_neighbours_draw_as_without_marked_rows() -> None:
    samplings = [PLAIN, Sampling(temperature=0.0), Sampling(seed=9, min_p=0.1, logprobs=2), Sampling(seed=8)]
    logits = torch.randn(5, WATERMARKS_VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    alone = SamplerRun(WATERMARKS_VOCAB_SIZE).sample(
        logits[:4], [watermarks_make_sequence(s, (1,) * 6, str(s.seed)) for s in samplings]
    )
    beside = SamplerRun(WATERMARKS_VOCAB_SIZE).sample(
        logits, [watermarks_make_sequence(s, (1, 2, 3, 4, 5, 6), str(n)) for n, s in enumerate([*samplings, MARKED])]
    )
    assert [one.token_ids for one in beside[:4]] == [one.token_ids for one in alone]
    assert [one.logprobs for one in beside[:4]] == [one.logprobs for one in alone]


def test_context_that_the_output_has_had_is_drawn_by_the_seed() -> None:
    """A text in a loop would else draw the same token each time, which is no sample any more."""
    loop = (11, 12, 13, 14) * 3
    logits = torch.randn(1, WATERMARKS_VOCAB_SIZE, generator=torch.Generator().manual_seed(2))

    def next_token(sampling: Sampling, output: tuple[int, ...]) -> int:
        return (
            SamplerRun(WATERMARKS_VOCAB_SIZE)
            .sample(logits, [watermarks_make_sequence(sampling, output)])[0]
            .token_ids[0]
        )

    repeated = {next_token(Sampling(seed=seed, watermark=KEY), loop) for seed in range(20)}
    assert repeated == {next_token(Sampling(seed=seed), loop) for seed in range(20)}
    assert len(repeated) > 5
    new = (*range(20, 30), 11, 12, 13, 14)
    assert len({next_token(Sampling(seed=seed, watermark=KEY), new) for seed in range(20)}) == 1


def test_context_that_only_drafts_have_had_is_repeated_too() -> None:
    output, draft = (1, 2, 3, 4), (1, 2, 3, 4)
    logits = torch.randn(1, WATERMARKS_VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    sequence = watermarks_make_sequence(MARKED, output)
    logits[0, list(draft)] += 0.0
    rows = torch.full((5, WATERMARKS_VOCAB_SIZE), -30.0)
    for depth, token_id in enumerate(draft):
        rows[depth, token_id] = 30.0
    rows[4] = logits[0]
    drafted = SamplerRun(WATERMARKS_VOCAB_SIZE).verify(rows, [sequence], [Draft(draft)])[0].token_ids
    known = watermarks_make_sequence(Sampling(seed=3, top_p=0.95), (*output, *draft))
    assert drafted[-1] == SamplerRun(WATERMARKS_VOCAB_SIZE).sample(logits, [known])[0].token_ids[0]
    assert scored_places([*output, *drafted]) == [4, 5, 6, 7]
