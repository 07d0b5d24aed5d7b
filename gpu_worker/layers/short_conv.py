"""A gated short convolution, which mixes a token with the few before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.cache_layout import KeepsState, LayerMemory, LayerState, StatePart
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection, to_stream
from kernels.causal_conv import causal_conv
from kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A gated short convolution of `num_channels`, over `conv_width` tokens, each itself included.

    With `has_bias`, the convolution and both projections have one.
    """

    num_channels: int
    conv_width: int
    has_bias: bool = False

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections to the gates and the input, and back."""
        channels = self.num_channels
        parts = (channels,) * 3
        return {
            "inputs": LinearShape(
                ("conv.in_proj",), (3 * channels,), hidden_size, Partition.COLUMN, self.has_bias, parts=parts
            ),
            "output": to_stream("conv.out_proj", hidden_size, channels, has_bias=self.has_bias),
        }

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps: the last inputs of the convolution."""
        return KeepsState((StatePart((self.conv_width - 1, self.num_channels), torch.float32),), self.num_channels)

    def take(self, source: LayerSource, prefix: str) -> ShortConvWeights:
        """Take the weights of the layer `prefix`."""
        name, channels = f"{prefix}.conv", self.num_channels
        conv = source.checkpoint.take(f"{name}.conv.weight", channels, 1, self.conv_width)
        linears = source.linears(prefix, self.linears(source.block.names, source.hidden_size))
        return ShortConvWeights(
            linears["inputs"],
            conv[:, 0].t().contiguous(),
            source.checkpoint.take(f"{name}.conv.bias", channels) if self.has_bias else None,
            linears["output"],
        )


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """A gated short convolution.

    Attributes:
        inputs: Yields the gate of the input, that of the output, then the input.
        conv: `[conv_width, num_channels]`.
    """

    inputs: Projection
    conv: torch.Tensor
    bias: torch.Tensor | None
    output: Projection

    def block(self, parts: LayerParts, index: int) -> ShortConv:
        """Make the block; `index` is the layer's number, by which it finds its state."""
        return ShortConv(index, self, parts.linear(self.inputs), parts.linear(self.output))


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """Multiplies what goes into a convolution, and what comes out of it, by gates of the token.

    Source: LFM2 technical report, arXiv 2511.23404, section 2.
    """

    index: int
    weights: ShortConvWeights
    inputs: Linear
    output: Linear

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Take the state of each sequence through its tokens."""
        state, rows = context.state_of(self.index)
        input_gate, output_gate, features = self.inputs(x, context).chunk(3, dim=1)
        gated = input_gate * features
        state.keep_drafts(rows, gated)
        return self.output(output_gate * self._convolve(gated, state, rows), context)

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Advance states by tokens computed before; `inputs`, as they were kept, is `[num_tokens, num_inputs]`."""
        self._convolve(inputs.to(self.weights.conv.dtype), state, rows)

    def _convolve(self, x: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        weights = self.weights
        return causal_conv(x, weights.conv, weights.bias, state.parts[0], rows, has_silu=False)
