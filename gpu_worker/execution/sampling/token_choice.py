"""Drawing tokens from truncated distributions, one uniform number a row, without sorting the vocabulary.

The draw inverts the cumulative distribution over the kept tokens in order of their ids. Of the exact methods this is
the one that tiny differences of the logits disturb least: candidates that swap ranks change nothing, and a token
changes only when the uniform number falls within such a difference of a boundary. It is also the cheapest.

Truncation follows vLLM: `min_p`, `top_k` and `top_p` act in this order on the distribution after temperature, `top_p`
on what the others have left, renormalised. Tokens that tie with the k-th stay, and the most likely token always does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shared.errors import HeadraceError

# How many of the most likely tokens are looked at first, second, and after that all of them.
_CANDIDATES = (80, 1024)


class InvalidLogitsError(HeadraceError):
    """The model computed NaN."""

    def __init__(self) -> None:
        """Say what it means for the operator."""
        super().__init__("the model's logits are not numbers: its weights or their data type are broken")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Per row, `[num_rows, 1]`: which tokens may be chosen.

    Attributes:
        log_min_p: Logarithm of `min_p`; minus infinity keeps all.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
    """

    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    def select(self, rows: torch.Tensor) -> Truncation:
        """Return the truncation of some rows."""
        return Truncation(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])


def choose(scaled: torch.Tensor, uniform: torch.Tensor, log_min_p: torch.Tensor | None) -> torch.Tensor:
    """Draw one token a row from the whole vocabulary, less what `min_p` drops.

    Args:
        scaled: Logits over temperature, less their maximum.
        uniform: One number in [0, 1) a row.
        log_min_p: As in `Truncation`, or None when no row uses it.

    Shapes:
        scaled: `[num_rows, vocab_size]`
        uniform: `[num_rows]` float64
        result: `[num_rows]` int64
    """
    weights = scaled.exp()
    if log_min_p is not None:
        weights.masked_fill_(scaled < log_min_p, 0.0)
    return _invert(weights, uniform)


def choose_truncated(scaled: torch.Tensor, uniform: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Draw one token a row from what `truncation` leaves. Arguments as for `choose`."""
    chosen = torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device)
    open_rows = torch.arange(scaled.shape[0], device=scaled.device)
    vocab_size = scaled.shape[1]
    for width in (*(width for width in _CANDIDATES if width < vocab_size), vocab_size):
        ids, weights, resolved = _candidates(scaled, truncation, width)
        if resolved.all():
            chosen[open_rows] = _draw(ids, weights, uniform)
            return chosen
        chosen[open_rows[resolved]] = _draw(ids[resolved], weights[resolved], uniform[resolved])
        unresolved = ~resolved
        open_rows, scaled, uniform = open_rows[unresolved], scaled[unresolved], uniform[unresolved]
        truncation = truncation.select(unresolved)
    raise InvalidLogitsError


def _candidates(
    scaled: torch.Tensor, truncation: Truncation, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Truncate the `width` most likely tokens of each row.

    Returns:
        Their ids; their weights, 0 where dropped; and per row whether all kept tokens are among them.
    """
    values, ids = scaled.topk(width)
    top_k, is_whole = truncation.top_k, width == scaled.shape[1]
    kth = values.gather(1, top_k.clamp(1, width) - 1)
    least = torch.where((top_k > 0) & (top_k <= width), kth, float("-inf")).maximum(truncation.log_min_p)
    weights = values.exp().masked_fill_(values < least, 0.0)
    is_complete = (values[:, -1:] < least) | is_whole
    total = weights.sum(1, keepdim=True)
    is_summed = torch.zeros_like(is_complete)
    if not is_whole:
        # Where more tokens survive than were looked at, `top_p` still can be applied if their sum is known.
        is_summed = ~is_complete & (top_k == 0) & (truncation.top_p < 1.0)
        if is_summed.any():
            survivors = scaled.exp().masked_fill_(scaled < truncation.log_min_p, 0.0)
            total = torch.where(is_summed, survivors.sum(1, keepdim=True), total)
    # Tokens that tie stand or fall together, because the order in which `topk` leaves them is chance.
    first_of_tie = torch.searchsorted(-values, -values).clamp_(max=width - 1)
    before = F.pad(weights.cumsum(1)[:, :-1], (1, 0)).gather(1, first_of_tie)
    kept = (before < truncation.top_p * total) | (truncation.top_p >= 1.0) | (first_of_tie == 0)
    is_complete |= is_summed & ~kept[:, -1:]
    return ids, weights * kept, is_complete[:, 0]


def _draw(ids: torch.Tensor, weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one of the weighted candidates of each row."""
    ids, order = ids.sort(1)
    index = _invert(weights.gather(1, order), uniform)
    return ids.gather(1, index[:, None])[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row whose cumulative weight exceeds `uniform` times the row's sum."""
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    # Rounding must not carry the target up to the total, which would choose a token of weight 0 or none.
    target = (uniform[:, None] * total).float().minimum(total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    if index.numel() and int(index.max()) >= weights.shape[1]:
        raise InvalidLogitsError
    return index
