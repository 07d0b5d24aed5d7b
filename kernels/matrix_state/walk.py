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
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from kernels.cpu_library import DTYPE_NUMBERS
from kernels.state_rows import StateRows, sequences_of


class MatrixShape(NamedTuple):
    """The shape of a sequence's state: for each head `key_dim` rows and `value_dim` columns."""

    num_heads: int
    key_dim: int
    value_dim: int


class StateSizes(Protocol):
    """The sizes of a rule."""

    @property
    def state_shape(self) -> MatrixShape:
        """Of a sequence."""


SizesT = TypeVar("SizesT", bound=StateSizes)
WeightsT = TypeVar("WeightsT")


@dataclass(frozen=True, slots=True)
class StateStep(Generic[SizesT, WeightsT]):
    """The tokens of a step for one layer, whose rule updates the states of their sequences.

    Attributes:
        features: `[num_tokens, num_features]`, what each token reads, writes and adds, in the order of the rule. May be
            strided in its first dimension.
        gates: `[num_tokens, num_gates]`, of the same type, before their functions. Likewise.
        weights: Of the rule.
        sizes: Heads and their widths.
        states: `[num_slots, num_heads, key_dim, value_dim]` float32, of all slots; contiguous. Replaced by those behind
            the step's kept tokens.
        rows: The sequences.
    """

    features: torch.Tensor
    gates: torch.Tensor
    weights: WeightsT
    sizes: SizesT
    states: torch.Tensor
    rows: StateRows

    def empty_result(self) -> torch.Tensor:
        """Return a tensor `[num_tokens, num_heads, value_dim]` of the features' type, to be written."""
        heads, _, value_dim = self.sizes.state_shape
        return self.features.new_empty(self.features.shape[0], heads, value_dim)


CHUNK = 64
"""Tokens that are taken at once where a rule has a form for several."""

Update = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Given which tokens, and the state before them, returns what they read, and the state behind them."""


def walk(update: Update, step: StateStep[SizesT, WeightsT], *, chunk: int = CHUNK) -> torch.Tensor:
    """Take the state of each sequence through its tokens, and store those that are kept or copied.

    Return what the tokens read, `[num_tokens, num_heads, value_dim]`. The states that `update` gets have no slots.
    """
    result, states = step.empty_result(), step.states
    dtype = torch.promote_types(result.dtype, torch.float32)
    for sequence in sequences_of(step.rows):
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


def can_run(step: StateStep[SizesT, WeightsT]) -> bool:
    """Return True where the compiled kernels support the types, sizes and layouts."""
    features, gates, states = step.features, step.gates, step.states
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
