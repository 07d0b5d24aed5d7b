"""Detects the watermark of a text: are its tokens luckier, under the random numbers of a key, than chance explains?

A marked text draws each token by random numbers that the key and the four tokens before it decide
(`shared.watermark`), so its tokens tend to have high ones. To any other text the numbers say nothing: they are
independent and uniform, one for each context that is new in the text, and `-log(1 - u)` of one is exponential. The sum
of n of these has a Gamma distribution, whose tail is the p-value: exact, not an approximation for long texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from msgspec import Struct
from msgspec.structs import replace

from kernels.sampling import token_uniforms
from shared.watermark import CONTEXT, mark_of


class Detection(Struct, frozen=True):
    """What a key says of a text.

    Attributes:
        num_tokens: Of the text.
        num_scored: Tokens behind a context that is new in the text; a text of fewer than five has none.
        score: The sum of `-log(1 - u)` over these; on average `num_scored` without a watermark.
        log10_p: Logarithm of the probability that a text without the watermark scores as high.
    """

    num_tokens: int
    num_scored: int
    score: float
    log10_p: float

    @property
    def p_value(self) -> float:
        """The same probability; 0 where it is too small for a float."""
        return math.pow(10.0, self.log10_p)


def scored_places(token_ids: Sequence[int]) -> list[int]:
    """Return the places of the tokens that count: those behind a context that the text has not had before."""
    firsts: dict[tuple[int, ...], int] = {}
    for place in range(CONTEXT, len(token_ids)):
        firsts.setdefault(tuple(token_ids[place - CONTEXT : place]), place)
    return list(firsts.values())


def scores(texts: Iterable[tuple[Sequence[int], bytes]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, of each text with a key, how many tokens count, and the sum of their `-log(1 - u)`.

    Shapes:
        result: `[num_texts]` int64, `[num_texts]` float64
    """
    marks: list[int] = []
    drawn: list[int] = []
    counts: list[int] = []
    for token_ids, key in texts:
        places = scored_places(token_ids)
        marks += [mark_of(key, token_ids[place - CONTEXT : place]) for place in places]
        drawn += [token_ids[place] for place in places]
        counts.append(len(places))
    numbers = torch.tensor(counts, dtype=torch.int64)
    uniforms = token_uniforms(torch.tensor(marks, dtype=torch.int64), torch.tensor(drawn, dtype=torch.int64))
    of_text = torch.arange(len(counts)).repeat_interleave(numbers)
    return numbers, torch.zeros(len(counts), dtype=torch.float64).index_add_(0, of_text, -torch.log1p(-uniforms))


def detect(token_ids: Sequence[int], key: bytes) -> Detection:
    """Score a text. `key` is the one of the tenant and model that may have written it, 32 bytes."""
    counts, sums = scores([(token_ids, key)])
    count, score = int(counts), float(sums)
    return Detection(len(token_ids), count, score, log_gamma_tail(count, score) / math.log(10.0))


def detect_best(token_ids: Sequence[int], keys: Sequence[bytes]) -> tuple[int, Detection]:
    """Score a text by each of different keys; return the place of the one that fits best, and what it says.

    The probability is that of a score as high by any of the keys: at most the smallest times their number (Bonferroni).
    """
    found = [detect(token_ids, key) for key in keys]
    place = min(range(len(keys)), key=lambda each: found[each].log10_p)
    log10_p = min(0.0, found[place].log10_p + math.log10(len(keys)))
    return place, replace(found[place], log10_p=log10_p)


def log_gamma_tail(count: int, score: float) -> float:
    """Return the natural logarithm of the probability that `count` exponential numbers sum up to at least `score`.

    That is the probability of fewer than `count` events of a Poisson process by the time `score`.
    """
    if count == 0 or score <= 0.0:
        return 0.0
    events = torch.arange(count, dtype=torch.float64)
    terms = events * math.log(score) - torch.lgamma(events + 1) - score
    return min(0.0, float(terms.logsumexp(0)))
