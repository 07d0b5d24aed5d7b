"""Watermarked sequences: one text whatever the batch, the drafts and the worker; loops as without; others untouched."""

from __future__ import annotations

import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from ops.watermark import detect, scored_places
from shared.sampling import Sampling
from tests.gpu_worker.execution.sampling.sampler_run import SamplerRun

VOCAB_SIZE = 90
PROMPT = [5, 6, 7, 8, 9]
KEY = "0f" * 32
MARKED = Sampling(seed=3, top_p=0.95, watermark=KEY)
PLAIN = Sampling(seed=3, top_p=0.95)


def logits_behind(token_ids: list[int]) -> torch.Tensor:
    """Stand for a model: logits that depend on the last token and the number of tokens."""
    seed = token_ids[-1] * 1009 + len(token_ids)
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


def make_sequence(sampling: Sampling, output: tuple[int, ...] = (), name: str = "s") -> Sequence:
    return Sequence(name, [*PROMPT, *output], len(PROMPT), sampling, max_tokens=1000)


def written(sampling: Sampling, length: int, output: tuple[int, ...] = ()) -> list[int]:
    """Return an output of `length` tokens that goes on from `output`, by a sampler that knows no other sequence."""
    run, sequence = SamplerRun(VOCAB_SIZE), make_sequence(sampling, output)
    while sequence.num_output_tokens < length:
        sequence.token_ids.append(run.sample(logits_behind(sequence.token_ids), [sequence])[0].token_ids[0])
    return sequence.token_ids[len(PROMPT) :]


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
    run, sequence = SamplerRun(VOCAB_SIZE), make_sequence(MARKED)
    while (num_known := sequence.num_output_tokens) < 60:
        # Two drafts are right and the third is wrong.
        right = whole[num_known : num_known + 2]
        draft = (*right, (whole[num_known + 2] + 1) % VOCAB_SIZE) if num_known + 2 < 60 else tuple(right)
        rows = [logits_behind([*sequence.token_ids, *draft[:depth]]) for depth in range(len(draft) + 1)]
        sampled = run.verify(torch.cat(rows), [sequence], [Draft(draft)])[0]
        sequence.token_ids += sampled.token_ids
    assert sequence.token_ids[len(PROMPT) :][:60] == whole


def test_neighbours_draw_as_without_marked_rows() -> None:
    samplings = [PLAIN, Sampling(temperature=0.0), Sampling(seed=9, min_p=0.1, logprobs=2), Sampling(seed=8)]
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    alone = SamplerRun(VOCAB_SIZE).sample(logits[:4], [make_sequence(s, (1,) * 6, str(s.seed)) for s in samplings])
    beside = SamplerRun(VOCAB_SIZE).sample(
        logits, [make_sequence(s, (1, 2, 3, 4, 5, 6), str(n)) for n, s in enumerate([*samplings, MARKED])]
    )
    assert [one.token_ids for one in beside[:4]] == [one.token_ids for one in alone]
    assert [one.logprobs for one in beside[:4]] == [one.logprobs for one in alone]


def test_context_that_the_output_has_had_is_drawn_by_the_seed() -> None:
    """A text in a loop would else draw the same token each time, which is no sample any more."""
    loop = (11, 12, 13, 14) * 3
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))

    def next_token(sampling: Sampling, output: tuple[int, ...]) -> int:
        return SamplerRun(VOCAB_SIZE).sample(logits, [make_sequence(sampling, output)])[0].token_ids[0]

    repeated = {next_token(Sampling(seed=seed, watermark=KEY), loop) for seed in range(20)}
    assert repeated == {next_token(Sampling(seed=seed), loop) for seed in range(20)}
    assert len(repeated) > 5
    new = (*range(20, 30), 11, 12, 13, 14)
    assert len({next_token(Sampling(seed=seed, watermark=KEY), new) for seed in range(20)}) == 1


def test_context_that_only_drafts_have_had_is_repeated_too() -> None:
    output, draft = (1, 2, 3, 4), (1, 2, 3, 4)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    sequence = make_sequence(MARKED, output)
    logits[0, list(draft)] += 0.0
    rows = torch.full((5, VOCAB_SIZE), -30.0)
    for depth, token_id in enumerate(draft):
        rows[depth, token_id] = 30.0
    rows[4] = logits[0]
    drafted = SamplerRun(VOCAB_SIZE).verify(rows, [sequence], [Draft(draft)])[0].token_ids
    known = make_sequence(Sampling(seed=3, top_p=0.95), (*output, *draft))
    assert drafted[-1] == SamplerRun(VOCAB_SIZE).sample(logits, [known])[0].token_ids[0]
    assert scored_places([*output, *drafted]) == [4, 5, 6, 7]
