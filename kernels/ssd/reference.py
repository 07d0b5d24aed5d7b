"""Mamba-2's state update: in plain torch, by token (the oracle of all other forms) and by chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.matrix_state.walk import CHUNK, MatrixShape, StateStep, fading_of, read_and_add, walk


@dataclass(frozen=True, slots=True)
class SsdSizes:
    """Consecutive heads share the inputs and outputs (B and C) of a group; groups divide heads."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int

    @property
    def inner_size(self) -> int:
        """Values of a token."""
        return self.num_heads * self.head_dim

    @property
    def num_features(self) -> int:
        """Values, inputs and outputs of a token."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def num_gates(self) -> int:
        """Steps of a token."""
        return self.num_heads

    @property
    def state_shape(self) -> MatrixShape:
        """Of a sequence."""
        return MatrixShape(self.num_heads, self.state_size, self.head_dim)


@dataclass(frozen=True, slots=True)
class SsdWeights:
    """What turns a token's step into a decay, and what passes the state by.

    Attributes:
        rate: `[num_heads]` float32, positive: how fast each head forgets.
        step_bias: `[num_heads]` float32, added to the step.
        skip: `[num_heads]` float32, what of a value is added to the result.
        min_step, max_step: Bounds of steps.
    """

    rate: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    min_step: float = 0.0
    max_step: float = math.inf


SsdStep = StateStep[SsdSizes, SsdWeights]
"""For annotations: only the class itself can be called, as it is frozen."""


@dataclass(frozen=True, slots=True)
class SsdInputs:
    """A step's inputs, taken apart: float32, or float64 where the tokens are.

    Attributes:
        value: `[num_tokens, num_heads, head_dim]`.
        scaled: The same times the token's step.
        input: `[num_tokens, num_heads, state_size]`, B.
        output: Likewise, C.
        log_decay: `[num_tokens, num_heads]`, not above zero.
    """

    value: torch.Tensor
    scaled: torch.Tensor
    input: torch.Tensor
    output: torch.Tensor
    log_decay: torch.Tensor


def take_apart(step: SsdStep) -> SsdInputs:
    """Give each head its group's inputs and outputs, and compute what the steps mean."""
    features, weights, sizes = step.features, step.weights, step.sizes
    dtype = torch.promote_types(features.dtype, torch.float32)
    num_tokens, repeats = features.shape[0], sizes.num_heads // sizes.num_groups
    widths = [sizes.inner_size, *[sizes.num_groups * sizes.state_size] * 2]
    value, *shared = features.to(dtype).split_with_sizes(widths, dim=1)
    value = value.reshape(num_tokens, sizes.num_heads, sizes.head_dim)
    groups = (part.reshape(num_tokens, sizes.num_groups, sizes.state_size) for part in shared)
    state_input, output = (part.repeat_interleave(repeats, 1) for part in groups)
    times = functional.softplus(step.gates.to(dtype) + weights.step_bias).clamp(weights.min_step, weights.max_step)
    return SsdInputs(value, value * times[:, :, None], state_input, output, -weights.rate * times)


def ssd_reference(step: SsdStep) -> torch.Tensor:
    """Compute what `kernels.ssd.ssd` promises."""
    inputs = take_apart(step)
    decay, skipped = inputs.log_decay.exp(), inputs.value * step.weights.skip[:, None]

    def update(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = tokens.start
        added = inputs.input[token][:, :, None] * inputs.scaled[token][:, None]
        state = state * decay[token, :, None, None] + added
        return torch.einsum("hn,hnp->hp", inputs.output[token], state) + skipped[token], state

    return walk(update, step, chunk=1)


def ssd_chunked(step: SsdStep, *, chunk: int = CHUNK) -> torch.Tensor:
    """Compute what `kernels.ssd.ssd` promises, a chunk of tokens at a time, in matrix products.

    Source: Dao and Gu, arXiv 2405.21060, section 6.
    """
    inputs = take_apart(step)
    skipped = inputs.value * step.weights.skip[:, None]

    def update(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (inputs.output, inputs.input, inputs.scaled)
        output, state_input, scaled = (part[tokens].transpose(0, 1) for part in parts)
        read, state = read_and_add(output, state_input, scaled, fading_of(inputs.log_decay[tokens]), state)
        return read + skipped[tokens], state

    return walk(update, step, chunk=chunk)
