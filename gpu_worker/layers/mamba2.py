"""Mamba-2: a state space model with a short convolution before it, and a gated normalisation behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.cache_layout import LayerMemory, LayerState, matrix_memory
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection, VectorNorm, to_stream
from kernels.activation import Activation, activate
from kernels.causal_conv import causal_conv
from kernels.matrix_state.walk import StateStep
from kernels.rms_norm import rms_norm
from kernels.ssd import SsdSizes, SsdWeights, ssd
from kernels.state_rows import StateRows


class OutputNorm(Enum):
    """How vectors read from a state are normalised, a group of heads at a time, before or after their gate."""

    NONE = "none"
    BEFORE_GATE = "before"
    AFTER_GATE = "after"


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """A Mamba-2 mixer.

    Attributes:
        conv_width: Tokens that the convolution before it sees, each itself included.
        input_scales: What the input projection yields is multiplied by: gates, values, input vectors, output vectors,
            steps.
        output_scale: What the mixer yields is multiplied by.
    """

    sizes: SsdSizes
    conv_width: int
    norm: OutputNorm = OutputNorm.AFTER_GATE
    step_limits: tuple[float, float] = (0.0, math.inf)
    has_conv_bias: bool = True
    has_input_bias: bool = False
    has_output_bias: bool = False
    input_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections to gates, values, vectors and steps, and from the heads back."""
        sizes, groups = self.sizes, self.sizes.num_groups * self.sizes.state_size
        widths = (sizes.inner_size, sizes.inner_size, groups, groups, sizes.num_heads)
        return {
            "inputs": LinearShape(
                ("mamba.in_proj",),
                (sum(widths),),
                hidden_size,
                Partition.COLUMN,
                has_bias=self.has_input_bias,
                scales=tuple(zip(widths, self.input_scales, strict=True)),
                parts=widths,
            ),
            "output": to_stream(
                "mamba.out_proj",
                hidden_size,
                sizes.inner_size,
                has_bias=self.has_output_bias,
                scale=self.output_scale,
            ),
        }

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps: the last inputs of the convolution, and a matrix a head."""
        return matrix_memory(self.conv_width, self.sizes)

    def take(self, source: LayerSource, prefix: str) -> Mamba2Weights:
        """Take the weights of the layer `prefix`."""
        name, sizes, checkpoint = f"{prefix}.mamba", self.sizes, source.checkpoint
        conv = checkpoint.take(f"{name}.conv1d.weight", sizes.num_features, 1, self.conv_width)
        rate = checkpoint.take_float32(f"{name}.A_log", sizes.num_heads).exp()
        step_bias = checkpoint.take_float32(f"{name}.dt_bias", sizes.num_heads)
        skip = checkpoint.take_float32(f"{name}.D", sizes.num_heads)
        linears = source.linears(prefix, self.linears(source.block.names, source.hidden_size))
        return Mamba2Weights(
            shape=self,
            inputs=linears["inputs"],
            conv=conv[:, 0].t().contiguous(),
            conv_bias=checkpoint.take(f"{name}.conv1d.bias", sizes.num_features) if self.has_conv_bias else None,
            ssd=SsdWeights(rate, step_bias, skip, *self.step_limits),
            norm=None if self.norm is OutputNorm.NONE else checkpoint.take(f"{name}.norm.weight", sizes.inner_size),
            eps=source.eps,
            output=linears["output"],
        )


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """A Mamba-2 mixer.

    Attributes:
        inputs: Yields the gates of the output, then values, input vectors and output vectors, then the steps.
        conv: `[conv_width, num_features]`, of values, input vectors and output vectors.
        conv_bias: `[num_features]`, if it has one.
        ssd: Of decays, and of what passes the state by.
        norm: `[inner_size]`, of the vectors read; None if they are not normalised.
        is_norm_spread: One vector is normalised as a whole, of which others may have features too.
    """

    shape: Mamba2Shape
    inputs: Projection
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    ssd: SsdWeights
    norm: torch.Tensor | None
    eps: float
    output: Projection
    is_norm_spread: bool = False

    def block(self, parts: LayerParts, index: int) -> Mamba2:
        """Make the block; `index` is the layer's number, by which it finds its state."""
        return Mamba2(index, self, parts.linear(self.inputs), parts.linear(self.output), parts.vector_norm())


class Mamba2:
    """Mixes tokens through a state of fixed size.

    Source: Dao and Gu, arXiv 2405.21060, section 7.
    """

    def __init__(self, index: int, weights: Mamba2Weights, inputs: Linear, output: Linear, norm: VectorNorm) -> None:
        self._norm = norm
        self._index = index
        self._weights = weights
        self._inputs = inputs
        self._output = output
        sizes, factors = weights.shape.sizes, weights.norm
        self._ones = None if factors is None else factors.new_ones(sizes.inner_size // sizes.num_groups)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Take the state of each sequence through its tokens, and return what they read of it."""
        state, rows = context.state_of(self._index)
        gates, mixed = self._inputs(x, context).tensor_split((self._weights.shape.sizes.inner_size,), dim=1)
        state.keep_drafts(rows, mixed)
        read = self._recur(mixed, state, rows).flatten(1)
        return self._output(self._normalise(read, activate(gates, Activation.SILU)), context)

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Advance states by tokens computed before; `inputs`, as they were kept, is `[num_tokens, num_inputs]`."""
        self._recur(inputs.to(self._weights.conv.dtype), state, rows)

    def _recur(self, mixed: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        weights, (inputs, matrices) = self._weights, state.parts
        features, steps = mixed.tensor_split((weights.shape.sizes.num_features,), dim=1)
        features = causal_conv(features, weights.conv, weights.conv_bias, inputs, rows)
        return ssd(StateStep(features, steps, weights.ssd, weights.shape.sizes, matrices, rows))

    def _normalise(self, read: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        if self._weights.shape.norm is OutputNorm.AFTER_GATE:
            return self._normalise_groups(read * gates)
        return self._normalise_groups(read) * gates

    def _normalise_groups(self, read: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        if weights.norm is None or self._ones is None:
            return read
        if weights.is_norm_spread:
            return self._norm(read, weights.norm, weights.eps)
        if len(weights.norm) == len(self._ones):
            return rms_norm(read, weights.norm, weights.eps)
        # The kernel's weights are those of one vector: groups have each their own.
        return rms_norm(read.view(-1, len(self._ones)), self._ones, weights.eps).view(read.shape) * weights.norm
