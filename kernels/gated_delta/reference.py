"""The gated delta rule: in plain torch, by token (the oracle of all other forms) and by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.matrix_state.walk import CHUNK, Fading, MatrixShape, StateStep, fading_of, read_and_add, walk

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads of values are a multiple of heads of keys; consecutive ones share a key and a query."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_features(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_gates(self) -> int:
        """Strengths and steps of a token."""
        return 2 * self.num_value_heads

    @property
    def state_shape(self) -> MatrixShape:
        """Of a sequence."""
        return MatrixShape(self.num_value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What turns a token's gates into a decay.

    Attributes:
        rate: `[num_value_heads]` float32, positive: how fast each head forgets.
        step_bias: `[num_value_heads]` float32, added to the second gate.
    """

    rate: torch.Tensor
    step_bias: torch.Tensor


DeltaStep = StateStep[DeltaSizes, DeltaWeights]
"""For annotations: only the class itself can be called, as it is frozen."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """A step's inputs, taken apart: float32, or float64 where the tokens are.

    Attributes:
        query: `[num_tokens, num_value_heads, key_dim]`, of length `key_dim**-0.5`.
        key: Likewise, of length one.
        value: `[num_tokens, num_value_heads, value_dim]`.
        log_decay: `[num_tokens, num_value_heads]`, not above zero.
        strength: Likewise, between zero and one.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    strength: torch.Tensor


def take_apart(step: DeltaStep) -> DeltaInputs:
    """Normalise queries and keys, and compute what the gates mean."""
    qkv, weights, sizes = step.features, step.weights, step.sizes
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    num_tokens, repeats = qkv.shape[0], sizes.num_value_heads // sizes.num_key_heads
    widths = [sizes.num_key_heads * sizes.key_dim] * 2 + [sizes.num_value_heads * sizes.value_dim]
    query, key, value = qkv.to(dtype).split_with_sizes(widths, dim=1)
    query, key = (part.reshape(num_tokens, sizes.num_key_heads, sizes.key_dim) for part in (query, key))
    query, key = (part * (part.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for part in (query, key))
    strength, times = step.gates.to(dtype).chunk(2, dim=1)
    return DeltaInputs(
        query.repeat_interleave(repeats, 1) * sizes.key_dim**-0.5,
        key.repeat_interleave(repeats, 1),
        value.reshape(num_tokens, sizes.num_value_heads, sizes.value_dim),
        -weights.rate * functional.softplus(times + weights.step_bias),
        strength.sigmoid(),
    )


def gated_delta_reference(step: DeltaStep) -> torch.Tensor:
    """Compute what `kernels.gated_delta.gated_delta` promises."""
    inputs = take_apart(step)
    decay = inputs.log_decay.exp()

    def update(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = tokens.start
        key, query = inputs.key[token], inputs.query[token]
        state = state * decay[token, :, None, None]
        known = torch.einsum("hk,hkv->hv", key, state)
        correction = (inputs.value[token] - known) * inputs.strength[token, :, None]
        state = state + key[:, :, None] * correction[:, None]
        return torch.einsum("hk,hkv->hv", query, state), state

    return walk(update, step, chunk=1)


def gated_delta_chunked(step: DeltaStep, *, chunk: int = CHUNK) -> torch.Tensor:
    """Compute what `kernels.gated_delta.gated_delta` promises, a chunk of tokens at a time, in matrix products.

    The corrections of all tokens of a chunk are the solution of one triangular system, since each depends on those
    before it alone. Source: Yang et al., arXiv 2412.06464, section 3.3, and 2406.06484, equation 10.
    """
    inputs = take_apart(step)

    def update(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = (part[tokens].transpose(0, 1) for part in (inputs.query, inputs.key))
        fading = fading_of(inputs.log_decay[tokens])
        return read_and_add(query, key, _corrections(inputs, tokens, key, fading, state), fading, state)

    return walk(update, step, chunk=chunk)


def _corrections(
    inputs: DeltaInputs, tokens: slice, key: torch.Tensor, fading: Fading, state: torch.Tensor
) -> torch.Tensor:
    value, strength = inputs.value[tokens].transpose(0, 1), inputs.strength[tokens].t()[..., None]
    system = (strength * (key @ key.transpose(1, 2)) * fading.between).tril(-1)
    system = system + torch.eye(key.shape[1], dtype=system.dtype, device=system.device)
    wanted = strength * (value - fading.since_start * (key @ state))
    corrections: torch.Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return corrections
