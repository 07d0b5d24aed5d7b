"""Several tokens at once in plain torch, as attention whose scores fade; `triton_states` has the same on a GPU.

A token reads what it and those before it in the chunk add to the state, and the state before the chunk; all of it fades
from token to token. So a chunk takes a few matrix products, and the state is read and written once.
Source: Dao and Gu, arXiv 2405.21060, section 6; Yang et al., arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Fading:
    """What is left of something from one token of a chunk to another, per head; between zero and one.

    Attributes:
        between: `[num_heads, num_tokens, num_tokens]`, from the token of a column to that of a row; zero where that is
            an earlier one.
        since_start: `[num_heads, num_tokens, 1]`, of the state before the chunk, at each token.
        until_end: Likewise, of what each token adds, behind the last.
        whole: `[num_heads, 1, 1]`, of the state before the chunk, behind the last token.
    """

    between: torch.Tensor
    since_start: torch.Tensor
    until_end: torch.Tensor
    whole: torch.Tensor


def fading_of(log_decay: torch.Tensor) -> Fading:
    """Return how a state fades over a chunk, given each token's decay, `[num_tokens, num_heads]`, not above zero.

    Decays stay in log space until they are differences, which are never positive either.
    """
    total = log_decay.t().cumsum(1)
    return Fading(
        (total[:, :, None] - total[:, None]).tril().exp().tril(),
        total.exp()[..., None],
        (total[:, -1:] - total).exp()[..., None],
        total[:, -1, None, None].exp(),
    )


def read_and_add(
    query: torch.Tensor, key: torch.Tensor, added: torch.Tensor, fading: Fading, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the tokens of a chunk read, and the state behind them, to which each adds `outer(key, added)`.

    Shapes:
        query, key: `[num_heads, num_tokens, key_dim]`
        added: `[num_heads, num_tokens, value_dim]`
        state: `[num_heads, key_dim, value_dim]`
        result: `[num_tokens, num_heads, value_dim]`, and the state's
    """
    scores = query @ key.transpose(1, 2) * fading.between
    read = fading.since_start * (query @ state) + scores @ added
    state = state * fading.whole + (key * fading.until_end).transpose(1, 2) @ added
    return read.transpose(0, 1), state
