"""How far a model's log probabilities are from those of a baseline.

The statistic of a prompt is the mean of |Δ| over its tokens, in units of the standard deviation of the baseline's own
log probabilities: `mean |Δ| / std`. Noise and errors both grow with a model's logits, so the ratio is about the same
for a model that is sure of itself and for one that is not. A mean over a hundred tokens or more hardly varies.

Measured on the demo model (8 layers, trained; CPU) against itself in float32, over prompts of 24 to 900 tokens:

| served | mean |Δ| / std |
|---|---|
| float16, bfloat16 | 0.0004 to 0.0009, 0.0020 to 0.0030 |
| KV cache in int8, in fp8 | 0.002 to 0.004, 0.007 to 0.020 |
| weights in int8, fp8, int4 (rounded to nearest) | 0.007 to 0.017, 0.025 to 0.043, 0.065 to 0.110 |
| rotation base × 2: prompts of 28 tokens, of 900 | 0.010 to 0.014, 0.083 |
| rows of one matrix zeroed (32 of 256 to 704) | 0.003 to 0.26 |

So `LIMIT` is three times what rounding to bfloat16 makes, and below a sixth of what int4 makes. Other batch shapes and
devices round as bfloat16 does. Where a recording has measured more noise between its own passes, as with a mixture
whose experts change for the least difference, the limit is `NOISE_FACTOR` times that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

LIMIT = 0.01
PLACE_LIMIT = 0.05
"""Of a single token behind a part of the anchor that the prefix cache has. The most that bfloat16 made of one of 640
tokens was 0.018; one wrong block of 31 made at least 0.08 of the worst."""

NOISE_FACTOR = 4.0
MAX_NOISE = 0.02
"""A recording whose passes differ by more is refused: its limit would excuse a model in four bits."""

MAX_PLACE_NOISE = 0.2
"""More than this of single tokens is not believed, for the same reason."""

MAX_TOKEN_DIFFERENCE = 20.0
"""No token counts for more nats, so that the statistic of a model that is broken is a number too."""
_LEAST_SPREAD = 0.05


def limit(noise: float) -> float:
    """Return the deviation from which a probe fails, of a baseline whose passes differed by `noise`."""
    return max(LIMIT, NOISE_FACTOR * min(noise, MAX_NOISE))


def place_limit(noise: float) -> float:
    """Return the same of a single token, if `noise` is the most that one of them differed by."""
    return max(PLACE_LIMIT, NOISE_FACTOR * min(noise, MAX_PLACE_NOISE))


def place_deviation(expected: float, found: float, unit: float) -> float:
    """Return the deviation of a single token; `unit` is the spread of its prompt."""
    return _difference(expected, found) / unit


def spread(logprobs: Sequence[float]) -> float:
    """Return the standard deviation of a prompt's log probabilities, in nats; not below a small number."""
    mean = math.fsum(logprobs) / len(logprobs)
    return max(_LEAST_SPREAD, math.sqrt(math.fsum((value - mean) ** 2 for value in logprobs) / len(logprobs)))


def score_deviation(expected: Sequence[float], found: Sequence[float]) -> float:
    """Return the deviation of a prompt's tokens; both have one log probability a token."""
    return _mean_difference(zip(expected, found, strict=True)) / spread(expected)


def answer_deviation(
    expected: Sequence[Sequence[tuple[int, float]]],
    found: Sequence[tuple[int, Mapping[int, float]]],
    unit: float,
) -> float:
    """Return the deviation of the likely tokens behind a prompt.

    Places count up to the first in which another token was chosen, that one included: what follows has another prompt.

    Args:
        expected: The likely tokens in each place, best first, with their log probabilities.
        found: The token chosen in each place, and the log probabilities of the expected ones.
        unit: The spread of the prompt.
    """
    pairs: list[tuple[float, float]] = []
    for likely, (chosen, logprobs) in zip(expected, found, strict=False):
        # A model that does not have the token is another one.
        pairs += [(logprob, logprobs.get(token_id, math.inf)) for token_id, logprob in likely]
        if chosen != likely[0][0]:
            break
    return _mean_difference(pairs) / unit


def _mean_difference(pairs: Iterable[tuple[float, float]]) -> float:
    differences = [_difference(expected, found) for expected, found in pairs]
    return math.fsum(differences) / len(differences) if differences else MAX_TOKEN_DIFFERENCE


def _difference(expected: float, found: float) -> float:
    difference = abs(expected - found)
    # NaN compares as false.
    return difference if difference < MAX_TOKEN_DIFFERENCE else MAX_TOKEN_DIFFERENCE
