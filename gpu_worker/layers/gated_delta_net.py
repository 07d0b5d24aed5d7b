"""A gated delta net: linear attention with a short convolution before it, and a gated normalisation behind it."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_state import LayerState
from gpu_worker.layers.layer_weights import GatedDeltaWeights
from kernels.activation import Activation, activate
from kernels.causal_conv import causal_conv
from kernels.gated_delta import gated_delta
from kernels.linear import Linear
from kernels.rms_norm import rms_norm
from kernels.state_rows import StateRows


class GatedDeltaNet:
    """Mixes tokens through a state of fixed size.

    Source: Yang et al., arXiv 2412.06464, section 3.4.
    """

    __slots__ = ("_gates", "_index", "_inputs", "_output", "_weights")

    def __init__(self, index: int, weights: GatedDeltaWeights, inputs: Linear, gates: Linear, output: Linear) -> None:
        """Hold the projections.

        Args:
            index: Layer number, which chooses the layer's state.
            weights: Those of the projections are not read.
            inputs: Yields queries, keys, values, then the gates of the output.
            gates: Yields the strengths of the heads, then their steps.
            output: From the heads back to the residual stream.
        """
        self._index = index
        self._weights = weights
        self._inputs = inputs
        self._gates = gates
        self._output = output

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Take the state of each sequence through its tokens, and return what they read of it.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
        """
        num_tokens, weights = x.shape[0], self._weights
        state, rows = context.state_of(self._index)
        features, gates = self._inputs(x), self._gates(x)
        mixed, output_gate = features.tensor_split((weights.shape.sizes.num_features,), dim=1)
        if rows.num_kept is not None:
            state.keep_drafts(rows, torch.cat((mixed, gates), dim=1))
        read = self._recur(mixed, gates, state, rows)
        normed = rms_norm(read.view(-1, read.shape[-1]), weights.norm, weights.eps).view(num_tokens, -1)
        return self._output(normed * activate(output_gate, Activation.SILU))

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Take states through tokens that were computed before.

        Shapes:
            inputs: `[num_tokens, num_inputs]`, as they were kept
        """
        inputs = inputs.to(self._weights.conv.dtype)
        mixed, gates = inputs.tensor_split((self._weights.shape.sizes.num_features,), dim=1)
        self._recur(mixed, gates, state, rows)

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        weights, (inputs, matrices) = self._weights, state.parts
        qkv = causal_conv(mixed, weights.conv, None, inputs, rows)
        return gated_delta(qkv, gates, weights.delta, weights.shape.sizes, matrices, rows)
