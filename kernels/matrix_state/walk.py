"""Takes states through the tokens of a step in plain torch, with whichever rule updates them.

By chunk this is attention whose scores fade: a token reads what it and those before it in the chunk add to the state,
and the state before the chunk, and all of it fades from token to token. So a chunk takes a few matrix products, and the
state is read and written once. `triton_states` has the same on a GPU.
Source: Dao and Gu, arXiv 2405.21060, section 6; Yang et al., arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from kernels.cpu_library import DTYPE_NUMBERS
from kernels.state_rows import StateRows, sequences_of


class MatrixShape(NamedTuple):
    """The shape of a sequence's state: for each head `key_dim` rows and `value_dim` columns."""

    num_heads: int
    key_dim: int
    value_dim: int


CHUNK = 64
"""Tokens that are taken at once where a rule has a form for several."""

Update = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Given which tokens, and the state before them, returns what they read, and the state behind them."""


def walk(
    update: Update, result: torch.Tensor, states: torch.Tensor, rows: StateRows, *, chunk: int = CHUNK
) -> torch.Tensor:
    """Take the state of each sequence through its tokens, and store those that are kept or copied.

    Shapes:
        result: `[num_tokens, num_heads, value_dim]`
        states: `[num_slots, num_heads, key_dim, value_dim]`; `update` has no slots
    """
    dtype = torch.promote_types(result.dtype, torch.float32)
    for sequence in sequences_of(rows):
        state = states[sequence.slot].to(dtype)
        if sequence.is_new:
            state = torch.zeros_like(state)
        behind = {0: state}
        # A chunk ends where a state is kept or copied.
        for before, count in pairwise((0, *sequence.ends)):
            for start in range(sequence.first + before, sequence.first + count, chunk):
                tokens = slice(start, min(start + chunk, sequence.first + count))
                result[tokens], state = update(tokens, state)
            behind[count] = state
        if not sequence.is_padding:
            for count, slot in (*sequence.saves, (sequence.num_kept, sequence.slot)):
                states[slot] = behind[count]
    return result


MAX_KEY_DIM = 256
"""`kMaxKeyDim` of columns.h."""


def can_run(features: torch.Tensor, gates: torch.Tensor, states: torch.Tensor) -> bool:
    """Return True where the kernels support the types, sizes and layouts.

    Shapes:
        features, gates: `[num_tokens, ...]`
        states: `[num_slots, num_heads, key_dim, value_dim]`
    """
    return (
        features.is_cpu
        and features.dtype in DTYPE_NUMBERS
        and features.dtype is gates.dtype
        and features.stride(1) == gates.stride(1) == 1
        and states.dtype is torch.float32
        and states.is_contiguous()
        and states.shape[2] <= MAX_KEY_DIM
    )


@dataclass(frozen=True, slots=True)
class Fading:
    """The share of a value that remains from one token of a chunk to another, per head; between zero and one.

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
