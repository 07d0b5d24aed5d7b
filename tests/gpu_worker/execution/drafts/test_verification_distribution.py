"""Verified drafts leave the distribution of whole answers as it is, by the exact one of a model of few tokens."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from shared.sampling import Sampling
from tests.gpu_worker.execution.sampling.sampler_run import SamplerRun, adjusted_logits, distribution

VOCAB = 8
LENGTH = 3
SAMPLING = {"temperature": 0.7, "top_p": 0.9}
BATCH = 512

# The next token's logits, by the token before.
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 0.8


def exact() -> dict[tuple[int, ...], float]:
    """The probability of every answer to a prompt of token 0, by the formula."""
    rules = Sampling(**SAMPLING)
    rows = [distribution(adjusted_logits(TABLE[token].tolist(), rules, [], []), rules) for token in range(VOCAB)]
    return {
        answer: math.prod(rows[before][after] for before, after in itertools.pairwise((0, *answer)))
        for answer in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def answers(num_samples: int, num_drafts: int) -> tuple[dict[tuple[int, ...], int], float]:
    """Generate with drafts that anybody could have made up; return how often each answer came, and the acceptance."""
    generator = random.Random(1)
    counts: dict[tuple[int, ...], int] = {}
    num_drafted = num_accepted = 0
    for first in range(0, num_samples, BATCH):
        open_ones = [
            Sequence(str(seed), [0], 1, Sampling(**SAMPLING, seed=seed), LENGTH) for seed in range(first, first + BATCH)
        ]
        sampler = SamplerRun(VOCAB)
        while open_ones:
            drafts = [Draft(tuple(generator.choices(range(VOCAB), k=num_drafts))) for _ in open_ones]
            before = [t for s, d in zip(open_ones, drafts, strict=True) for t in (s.token_ids[-1], *d.token_ids)]
            results = sampler.verify(TABLE[before], open_ones, drafts)
            for sequence, sampled in zip(open_ones, results, strict=True):
                sequence.token_ids += sampled.token_ids
                num_drafted += sampled.num_drafted
                num_accepted += sampled.num_accepted
                if len(sequence.token_ids) > LENGTH:
                    answer = tuple(sequence.token_ids[1 : LENGTH + 1])
                    counts[answer] = counts.get(answer, 0) + 1
            open_ones = [sequence for sequence in open_ones if len(sequence.token_ids) <= LENGTH]
    return counts, num_accepted / num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_answers_with_drafts_follow_the_exact_distribution(num_drafts: int) -> None:
    num_samples = 100 * BATCH
    counts, acceptance = answers(num_samples, num_drafts)
    expected = {answer: probability * num_samples for answer, probability in exact().items()}
    assert sum(counts.values()) == num_samples > 50_000
    assert 0.03 < acceptance < 0.95
    assert {answer for answer, _ in counts.items() if expected[answer] == 0} == set()
    common = [answer for answer, count in expected.items() if count >= 5]
    statistic = sum((counts.get(answer, 0) - expected[answer]) ** 2 / expected[answer] for answer in common)
    rest = num_samples - sum(expected[answer] for answer in common)
    if rest >= 5:
        statistic += (num_samples - sum(counts.get(answer, 0) for answer in common) - rest) ** 2 / rest
    degrees = len(common) - (rest < 5)
    assert degrees > 30
    # Exceeded with probability 0.001 (Wilson-Hilferty).
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
