from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.sampling.logprobs import prompt_chunks
from shared.sampling import Sampling
from tests.gpu_worker.execution.sampling.sampler_run import SamplerRun, adjusted_logits, distribution


def make_sequence(
    sampling: Sampling, prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), name: str = "s"
) -> Sequence:
    return Sequence(name, [*prompt, *output], len(prompt), sampling, max_tokens=1000)


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample_ids(logits: torch.Tensor, sequences: list[Sequence], sampler: SamplerRun | None = None) -> list[int]:
    sampled = (sampler or SamplerRun(logits.shape[1])).sample(logits, sequences)
    return [tokens.token_ids[0] for tokens in sampled]


def draw_many(logits: torch.Tensor, sampling: Sampling, count: int) -> torch.Tensor:
    """Histogram of draws for one row of logits: 100 positions of each of many seeds."""
    rows = count // 100
    sequences = [make_sequence(Sampling(**{**vars_of(sampling), "seed": seed}), name=str(seed)) for seed in range(rows)]
    sampler, drawn = SamplerRun(logits.shape[-1]), []
    for _ in range(100):
        drawn += sample_ids(logits.expand(rows, -1), sequences, sampler)
        for sequence in sequences:
            sequence.token_ids.append(0)
    return torch.bincount(torch.tensor(drawn), minlength=logits.shape[-1])


def vars_of(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def chi_square_limit(degrees: int) -> float:
    """Value exceeded with probability 0.001 (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


STATISTICS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=5),
    Sampling(top_k=1),
    Sampling(top_p=0.7),
    Sampling(top_p=0.0),
    Sampling(min_p=0.2),
    Sampling(temperature=1.5, top_k=12, top_p=0.8),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    Sampling(logit_bias={0: 3.0, 4: -100.0, 7: 100.0, 40: 5.0, 150: 5.0}),
    Sampling(logit_bias={0: 3.0, 4: -100.0}, top_p=0.9),
]


@pytest.mark.parametrize("vocab_size", [40, 150])
@pytest.mark.parametrize("sampling", STATISTICS, ids=str)
def test_draws_follow_the_exact_distribution(sampling: Sampling, vocab_size: int) -> None:
    logits = random_logits(1, vocab_size, seed=1, scale=1.0)
    count = 10_000
    observed = draw_many(logits, sampling, count).double()
    adjusted = adjusted_logits(logits[0].tolist(), sampling, [], [])
    expected = torch.tensor(distribution(adjusted, sampling), dtype=torch.float64) * count
    assert observed[expected == 0].sum() == 0
    common, rare = expected >= 5, (expected > 0) & (expected < 5)
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    degrees = int(common.sum()) - 1
    if expected[rare].sum() >= 5:
        statistic += (observed[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum()
        degrees += 1
    assert statistic <= (chi_square_limit(degrees) if degrees else 1e-9)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.99), Sampling(top_k=700), Sampling(top_k=2000, top_p=0.999), Sampling(top_k=1100)],
    ids=str,
)
def test_flat_distribution_needs_many_candidates_and_keeps_exactly_them(sampling: Sampling) -> None:
    logits = random_logits(1, 1200, seed=2, scale=0.01)
    exact = torch.tensor(distribution(logits[0].tolist(), sampling))
    observed = draw_many(logits, sampling, 4000)
    outside = observed[exact == 0].sum()
    assert outside <= 4000 * 2e-3  # float32 sums decide the last candidates
    assert observed[exact > 0].count_nonzero() > 0.8 * (exact > 0).sum() * (1 - math.exp(-4000 / 1200))
    assert (exact == 0).sum() >= (0 if sampling.top_k == 2000 else 10)


def test_ties_with_the_kth_token_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    observed = draw_many(logits, Sampling(top_k=2), 3000)
    assert observed[[0, 4]].sum() == 0
    assert (observed[1:4] > 800).all()


def test_many_ties_beyond_the_candidates_stay() -> None:
    observed = draw_many(torch.zeros(1, 200), Sampling(top_k=3), 4000)
    assert observed.count_nonzero() == 200


def test_greedy_takes_the_first_most_likely_token() -> None:
    logits = random_logits(5, 33)
    logits[2, [4, 20]] = 50.0
    sequences = [make_sequence(Sampling(temperature=0.0), name=str(row)) for row in range(5)]
    assert sample_ids(logits, sequences) == logits.argmax(-1).tolist()
    assert sample_ids(logits, sequences)[2] == 4


def test_vanishing_temperature_is_greedy() -> None:
    logits = random_logits(1, 33)
    assert sample_ids(logits, [make_sequence(Sampling(temperature=1e-40))]) == logits.argmax(-1).tolist()
    assert sample_ids(logits, [make_sequence(Sampling(temperature=2e-5))]) == logits.argmax(-1).tolist()


MIXED = [
    Sampling(temperature=0.0),
    Sampling(seed=3),
    Sampling(seed=4, top_k=5, temperature=0.7),
    Sampling(seed=5, top_p=0.8, logprobs=2),
    Sampling(seed=6, min_p=0.1),
    Sampling(seed=7, presence_penalty=1.5, frequency_penalty=0.5, logprobs=0),
    Sampling(seed=8, repetition_penalty=1.7, top_k=40),
    Sampling(temperature=0.0, repetition_penalty=5.0),
    Sampling(seed=9, logit_bias={5: 4.0}),
]


def test_kept_sampler_equals_new_sampler_while_sequences_come_and_go() -> None:
    sampler = SamplerRun(90)
    everyone = [make_sequence(sampling, name=str(row)) for row, sampling in enumerate(MIXED)]
    for step in range(100):
        present = [s for row, s in enumerate(everyone) if (step // 7 + row) % 3] if step % 20 > 3 else everyone
        logits = random_logits(len(present), 90, seed=step)
        kept = sampler.sample(logits, present)
        assert kept == SamplerRun(90).sample(logits, present)
        for sequence, tokens in zip(present, kept, strict=True):
            sequence.token_ids.append(tokens.token_ids[0])
    assert all(sequence.num_output_tokens > 50 for sequence in everyone)


ASKING = {
    "nothing": Sampling(temperature=0.0),
    "a bias": Sampling(temperature=0.0, logit_bias={7: 50.0}),
    "another bias": Sampling(temperature=0.0, logit_bias={9: 50.0}),
    "frequency": Sampling(temperature=0.0, frequency_penalty=2.0),
    "presence": Sampling(temperature=0.0, presence_penalty=2.0),
    "repetition": Sampling(temperature=0.0, repetition_penalty=1.8),
    "allowed tokens": Sampling(temperature=0.0, allowed_token_ids=(3, 5)),
    "a part": Sampling(top_k=3, seed=1),
    "log probabilities": Sampling(temperature=0.0, logprobs=2),
}


@pytest.mark.parametrize("former", ASKING)
def test_row_remembers_nothing_of_its_former_sequence(former: str) -> None:
    logits = random_logits(1, 40, scale=0.5)
    for asked in ASKING.values():
        kept, fresh = SamplerRun(40), SamplerRun(40)
        leaving = make_sequence(ASKING[former])
        for _ in range(6):
            leaving.token_ids += sample_ids(logits, [leaving], kept)
        kept.leave(leaving)
        # What the former one has drawn stands in the prompt of the next.
        following, alone = (make_sequence(asked, prompt=tuple(leaving.token_ids)) for _ in range(2))
        for _ in range(6):
            (sampled,), (expected,) = kept.sample(logits, [following]), fresh.sample(logits, [alone])
            assert sampled == expected
            following.token_ids += sampled.token_ids
            alone.token_ids += expected.token_ids


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, repetition_penalty=1.3),
        Sampling(temperature=0.0, presence_penalty=1.1),
        Sampling(temperature=0.0, frequency_penalty=0.6),
        Sampling(temperature=0.0, frequency_penalty=-0.6, presence_penalty=-2.0),
        Sampling(temperature=0.0, repetition_penalty=0.8, presence_penalty=0.3, frequency_penalty=0.2),
        Sampling(temperature=0.0, repetition_penalty=1.2, logit_bias={2: 1.0, 9: -3.0}),
    ],
    ids=str,
)
def test_penalties_equal_the_oracle_over_a_growing_sequence(sampling: Sampling) -> None:
    sampler = SamplerRun(80)
    sequence = make_sequence(sampling, prompt=(3, 3, 9, 0))
    for step in range(120):
        logits = random_logits(1, 80, seed=step)
        prompt, output = sequence.token_ids[:4], sequence.token_ids[4:]
        adjusted = adjusted_logits(logits[0].tolist(), sampling, prompt, output)
        [token_id] = sample_ids(logits, [sequence], sampler)
        assert adjusted[token_id] == pytest.approx(max(adjusted), abs=1e-5)
        sequence.token_ids.append(token_id)


def test_logprobs_are_of_the_unmodified_logits() -> None:
    sampling = Sampling(temperature=0.3, logit_bias={7: 100.0}, repetition_penalty=2.0, top_k=1, logprobs=3)
    logits = random_logits(1, 50)
    [sampled] = SamplerRun(50).sample(logits, [make_sequence(sampling)])
    raw = torch.log_softmax(logits[0], 0)
    assert sampled.token_ids == (7,)
    [entry] = sampled.logprobs
    assert entry.token_id == 7
    assert entry.logprob == pytest.approx(raw[7].item())
    expected = raw.topk(3)
    assert [token_id for token_id, _ in entry.top] == expected.indices.tolist()
    assert [logprob for _, logprob in entry.top] == pytest.approx(expected.values.tolist())


def test_logprobs_zero_reports_the_chosen_token_only() -> None:
    samplings = [Sampling(temperature=0.0), Sampling(temperature=0.0, logprobs=0), Sampling(logprobs=20)]
    sequences = [make_sequence(sampling, name=str(row)) for row, sampling in enumerate(samplings)]
    silent, zero, twenty = SamplerRun(12).sample(random_logits(3, 12), sequences)
    assert silent.logprobs == ()
    assert zero.logprobs[0].token_id == zero.token_ids[0]
    assert zero.logprobs[0].top == ()
    assert len(twenty.logprobs[0].top) == 12


def test_listed_tokens_are_reported_instead_of_the_likeliest_whatever_the_neighbours_ask_for() -> None:
    logits = random_logits(4, 50)
    samplings = [
        Sampling(logprobs=0, logprob_token_ids=(9, 3, 49, 77)),
        Sampling(logprobs=3),
        Sampling(logprobs=5, logprob_token_ids=(3,), logit_bias={3: -100.0}),
        Sampling(),
    ]
    sequences = [make_sequence(sampling, name=str(row)) for row, sampling in enumerate(samplings)]
    run = SamplerRun(50)
    listed, likeliest, single, silent = run.sample(logits.clone(), sequences)
    raw = torch.log_softmax(logits, 1)
    # 77 is outside the vocabulary.
    expected = sorted(((raw[0, token_id].item(), token_id) for token_id in (9, 3, 49)), reverse=True)
    assert [token_id for token_id, _ in listed.logprobs[0].top] == [token_id for _, token_id in expected]
    assert [value for _, value in listed.logprobs[0].top] == pytest.approx([value for value, _ in expected], abs=1e-5)
    assert listed.logprobs[0].logprob == pytest.approx(raw[0, listed.token_ids[0]].item(), abs=1e-5)
    assert [token_id for token_id, _ in likeliest.logprobs[0].top] == raw[1].topk(3).indices.tolist()
    assert single.logprobs[0].top == ((3, pytest.approx(raw[2, 3].item(), abs=1e-5)),)
    assert silent.logprobs == ()


INVALID = {
    "nan": torch.full((200,), math.nan),
    "one nan": torch.tensor([0.0] * 100 + [math.nan] + [0.0] * 99),
    "infinite": torch.tensor([0.0] * 100 + [math.inf] + [0.0] * 99),
    "all masked": torch.full((200,), -math.inf),
}


@pytest.mark.parametrize("invalid", INVALID)
def test_invalid_row_fails_alone_whatever_is_asked_for(invalid: str) -> None:
    sequences = [make_sequence(s, output=(4, 5), name=str(i)) for i, s in enumerate(MIXED * 2)]
    logits = random_logits(len(sequences), 200)
    expected = SamplerRun(200).sample(logits, sequences)
    for bad in range(len(MIXED)):
        broken = logits.clone()
        broken[bad] = INVALID[invalid]
        sampled = SamplerRun(200).sample(broken, sequences)
        assert sampled[bad].token_ids == ()
        assert sampled[bad].logprobs == ()
        assert "logits" in (sampled[bad].error or "")
        assert sampled[:bad] + sampled[bad + 1 :] == expected[:bad] + expected[bad + 1 :]


@pytest.mark.parametrize("invalid", INVALID)
@pytest.mark.parametrize("sampling", MIXED, ids=str)
def test_invalid_row_behind_right_drafts_ends_the_sequence_behind_them(sampling: Sampling, invalid: str) -> None:
    sequences = [make_sequence(sampling, name=name) for name in "ab"]
    logits = random_logits(6, 200)
    right = [SamplerRun(200).verify(logits, sequences, [Draft((199,) * 2)] * 2)[0].token_ids[0]]
    right.append(SamplerRun(200).verify(logits, sequences, [Draft((right[0], 199))] * 2)[0].token_ids[1])
    drafts = [Draft(tuple(right))] * 2
    expected = SamplerRun(200).verify(logits, sequences, drafts)
    assert expected[0].token_ids[:2] == tuple(right)
    for place in range(3):
        broken = logits.clone()
        broken[place] = INVALID[invalid]
        failed, sound = SamplerRun(200).verify(broken, sequences, drafts)
        assert failed.token_ids == tuple(right[:place])
        assert failed.logprobs == expected[0].logprobs[:place]
        assert failed.num_accepted == place
        assert "logits" in (failed.error or "")
        assert sound == expected[1]


def test_tiny_differences_of_logits_change_no_token() -> None:
    samplings = [Sampling(seed=s, top_k=s % 3 * 20, top_p=0.9 if s % 2 else 1.0) for s in range(64)]
    sequences = [make_sequence(sampling, name=str(row)) for row, sampling in enumerate(samplings)]
    logits = random_logits(64, 1000)
    noise = 1 + 1e-7 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(9))
    assert sample_ids(logits, sequences) == sample_ids(logits * noise, sequences)


class CountedReads(dict[int, float]):
    """A `logit_bias` that counts how often its entries are read."""

    num_reads = 0

    def keys(self) -> Any:
        self.num_reads += 1
        return super().keys()

    def items(self) -> Any:
        self.num_reads += 1
        return super().items()


def test_logit_bias_is_read_once_while_others_come_and_go() -> None:
    biases = [CountedReads({3: 100.0, 10_000: 1.0}) for _ in range(4)]
    sequences = [
        make_sequence(Sampling(temperature=0.0, logit_bias=bias), name=str(row)) for row, bias in enumerate(biases)
    ]
    sampler, logits = SamplerRun(16), random_logits(4, 16)
    for num in (4, 3, 4, 2, 4):
        assert sample_ids(logits[:num], sequences[:num], sampler) == [3] * num
    assert [bias.num_reads for bias in biases[:2]] == [1, 1]


def test_chunk_of_a_prompt_has_the_scores_of_its_own_tokens_and_the_next() -> None:
    sequence = Mock(token_ids=list(range(10)), num_prompt_tokens=8, sampling=Sampling(prompt_logprobs=1))
    starts = np.array([0, 2, 5, 8], dtype=np.int32)
    shares: Any = [
        Mock(sequence=sequence, start=first, num_tokens=last - first) for first, last in ((0, 2), (2, 5), (5, 8))
    ]
    assert [chunk.targets for chunk in prompt_chunks(shares, starts)] == [[1, 2], [3, 4, 5], [6, 7]]
