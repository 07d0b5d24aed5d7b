"""Mamba-2: a state space model with a short convolution before it, and a gated normalisation behind it."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention import Attention
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_state import LayerState
from gpu_worker.layers.layer_traits import OutputNorm
from gpu_worker.layers.layer_weights import Mamba2Weights
from kernels.activation import Activation, activate
from kernels.causal_conv import causal_conv
from kernels.linear import Linear
from kernels.rms_norm import rms_norm
from kernels.ssd import ssd
from kernels.state_rows import StateRows


class Mamba2:
    """Mixes tokens through a state of fixed size.

    Source: Dao and Gu, arXiv 2405.21060, section 7.
    """

    __slots__ = ("_index", "_inputs", "_ones", "_output", "_weights")

    def __init__(self, index: int, weights: Mamba2Weights, inputs: Linear, output: Linear) -> None:
        """Hold the projections.

        Args:
            index: Layer number, which chooses the layer's state.
            weights: Those of the projections are not read.
            inputs: Yields the gates of the output, then values, input vectors and output vectors, then the steps.
            output: From the heads back to the residual stream.
        """
        self._index = index
        self._weights = weights
        self._inputs = inputs
        self._output = output
        sizes, norm = weights.shape.sizes, weights.norm
        self._ones = None if norm is None else norm.new_ones(sizes.inner_size // sizes.num_groups)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Take the state of each sequence through its tokens, and return what they read of it.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
        """
        state, rows = context.state_of(self._index)
        gates, mixed = self._inputs(x).tensor_split((self._weights.shape.sizes.inner_size,), dim=1)
        state.keep_drafts(rows, mixed)
        read = self._recur(mixed, state, rows).flatten(1)
        return self._output(self._normalise(read, activate(gates, Activation.SILU)))

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Take states through tokens that were computed before.

        Shapes:
            inputs: `[num_tokens, num_inputs]`, as they were kept
        """
        self._recur(inputs.to(self._weights.conv.dtype), state, rows)

    def _recur(self, mixed: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        weights, (inputs, matrices) = self._weights, state.parts
        features, steps = mixed.tensor_split((weights.shape.sizes.num_features,), dim=1)
        features = causal_conv(features, weights.conv, weights.conv_bias, inputs, rows)
        return ssd(features, steps, weights.ssd, weights.shape.sizes, matrices, rows)

    def _normalise(self, read: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Normalise each group of heads by itself, and multiply by the gates, in the order that the shape says."""
        if self._weights.shape.norm is OutputNorm.AFTER_GATE:
            return self._normalise_groups(read * gates)
        return self._normalise_groups(read) * gates

    def _normalise_groups(self, read: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        if weights.norm is None or self._ones is None:
            return read
        if len(weights.norm) == len(self._ones):
            return rms_norm(read, weights.norm, weights.eps)
        # The kernel's weights are those of one vector: groups have each their own.
        return rms_norm(read.view(-1, len(self._ones)), self._ones, weights.eps).view(read.shape) * weights.norm


class AttentionBesideMamba2:
    """Attention and a state space model, which read the same vectors and whose results are added.

    Source: Zuo et al., Falcon-H1, arXiv 2507.22448, section 2.1.
    """

    __slots__ = ("_attention", "_mamba2")

    def __init__(self, attention: Attention, mamba2: Mamba2) -> None:
        """Hold both mixers of a layer."""
        self._attention = attention
        self._mamba2 = mamba2

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Return the sum of what both make of `x: [num_tokens, hidden_size]`."""
        return self._attention(x, positions, context) + self._mamba2(x, positions, context)

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Take states through tokens that were computed before: keys and values have places of their own."""
        self._mamba2.replay(inputs, state, rows)
