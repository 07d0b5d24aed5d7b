"""A gated short convolution, which mixes a token with the few before it."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_state import LayerState
from gpu_worker.layers.layer_weights import ShortConvWeights
from kernels.causal_conv import causal_conv
from kernels.linear import Linear
from kernels.state_rows import StateRows


class ShortConv:
    """Multiplies what goes into a convolution, and what comes out of it, by gates of the token.

    Source: LFM2 technical report, arXiv 2511.23404, section 2.
    """

    __slots__ = ("_index", "_inputs", "_output", "_weights")

    def __init__(self, index: int, weights: ShortConvWeights, inputs: Linear, output: Linear) -> None:
        """Hold the projections.

        Args:
            index: Layer number, which chooses the layer's state.
            weights: Those of the projections are not read.
            inputs: Yields the gate of the input, that of the output, then the input.
            output: Back to the residual stream.
        """
        self._index = index
        self._weights = weights
        self._inputs = inputs
        self._output = output

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Take the state of each sequence through its tokens.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
        """
        state, rows = context.state_of(self._index)
        input_gate, output_gate, features = self._inputs(x).chunk(3, dim=1)
        gated = input_gate * features
        state.keep_drafts(rows, gated)
        return self._output(output_gate * self._convolve(gated, state, rows))

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Take states through tokens that were computed before.

        Shapes:
            inputs: `[num_tokens, hidden_size]`, as they were kept
        """
        self._convolve(inputs.to(self._weights.conv.dtype), state, rows)

    def _convolve(self, x: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        weights = self._weights
        return causal_conv(x, weights.conv, weights.bias, state.parts[0], rows, has_silu=False)
