"""Steps that make everything happen which happens only once: kernels compiled, libraries loaded, memory taken.

A kernel that is compiled while requests wait delays all of them by seconds. Which variants there are depends on the
number of sequences, on the largest number of query tokens of one, and on what is asked of the sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence, StepPlan
from shared.messages import Sampling

# Up to this, products of few rows may be divided among programs in a way that depends on the exact number.
_MAX_DISTINCT_ROWS = 64
# Above this all chunks run in the same kernels: no model has tiles of more query tokens.
_MAX_DISTINCT_QUERY_LEN = 128
_GREEDY = Sampling(temperature=0.0)
_SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01),
    Sampling(temperature=1.0, presence_penalty=0.1),
    Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=20, prompt_logprobs=20),
)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds a step; `max_model_len` tokens have blocks."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int


def warm_up_plans(limits: StepLimits) -> Iterator[StepPlan]:
    """Yield steps to execute, the largest first, and one at the end that only lets the last sequences depart."""
    departed: list[Sequence] = []
    for lengths, sampling in _shapes(limits):
        scheduled = [ScheduledSequence(_sequence(length, sampling, limits), 0, length, True) for length in lengths]
        yield StepPlan(0, scheduled, sum(lengths), departed)
        departed = [item.sequence for item in scheduled]
    yield StepPlan(0, [], 0, departed)


def _shapes(limits: StepLimits) -> Iterator[tuple[list[int], Sampling]]:
    max_query_len = min(limits.max_model_len, limits.max_num_batched_tokens)
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    largest = _spread(limits.max_num_batched_tokens, most, limits.max_model_len)
    for sampling in reversed(_SAMPLINGS):
        yield largest, sampling
    for count in range(1, min(most, _MAX_DISTINCT_ROWS) + 1):
        yield [1] * count, _GREEDY
    for count in _powers_of_two(most):
        for query_len in _powers_of_two(max_query_len):
            is_distinct = query_len <= _MAX_DISTINCT_QUERY_LEN or count == 1
            if is_distinct and query_len + count - 1 <= limits.max_num_batched_tokens:
                yield [query_len] + [1] * (count - 1), _GREEDY


def _spread(num_tokens: int, count: int, max_len: int) -> list[int]:
    """Share out tokens to `count` sequences: as many to the first ones as they may have, one at least to each."""
    lengths, left = [], num_tokens
    for after in reversed(range(count)):
        lengths.append(min(max_len, left - after))
        left -= lengths[-1]
    return lengths


def _powers_of_two(most: int) -> list[int]:
    """Return those below `most`, and `most`."""
    return [*(1 << exponent for exponent in range((most - 1).bit_length())), most]


def _sequence(length: int, sampling: Sampling, limits: StepLimits) -> Sequence:
    """All of them use the same blocks: what they compute is of no interest."""
    blocks = list(range(-(-length // limits.block_size)))
    return Sequence("warm-up", [0] * length, length, sampling, 1, block_table=blocks)
