"""The uniform numbers of watermarked rows in plain torch: what draws them without a kernel, and what detects them."""

from __future__ import annotations

import torch

from kernels.sampling.philox import philox


def token_uniforms(marks: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the uniform number in (0, 1), with 32 random bits, of each token under a mark, float64.

    Four tokens share a counter: token `t` has word `t % 4` of counter `t // 4`.

    Shapes:
        marks, token_ids, result: the same, int64
    """
    first, second, third, fourth = philox(marks, token_ids >> 2)
    lane = token_ids & 3
    word = torch.where(lane < 2, torch.where(lane == 0, first, second), torch.where(lane == 2, third, fourth))
    return (word.double() + 0.5) * 2.0**-32


def marked_scores(scaled: torch.Tensor, least: torch.Tensor, marks: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return what decides which token a watermarked row draws: the highest score, the first of several.

    A score is a scaled logit plus the token's Gumbel noise `-log(-log(u))`: over many marks a token is drawn as often
    as the softmax says.

    Args:
        scaled: Logits less the highest of the row, times the inverse temperature.
        least: The smallest of these that each row keeps.
        marks: Of each row.
        first: The token of the first column.

    Shapes:
        scaled, result: `[num_rows, num_columns]`; the result is float64
        least, marks: `[num_rows]`
    """
    token_ids = torch.arange(first, first + scaled.shape[1], device=scaled.device).expand(scaled.shape)
    uniforms = token_uniforms(marks[:, None].expand(scaled.shape), token_ids)
    scores = scaled.double() - torch.log(-torch.log(uniforms))
    return scores.masked_fill_(scaled < least[:, None], -torch.inf)
