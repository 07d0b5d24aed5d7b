"""A gated delta net: linear attention with a short convolution before it, and a gated normalisation behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.cache_layout import LayerMemory, LayerState, matrix_memory
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection, to_stream
from gpu_worker.layers.stored_matrix import whole
from kernels.activation import Activation, activate
from kernels.causal_conv import causal_conv
from kernels.gated_delta import DeltaSizes, DeltaWeights, gated_delta
from kernels.linear.forms import reorder_columns
from kernels.matrix_state.walk import StateStep
from kernels.rms_norm import rms_norm
from kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """A gated delta net.

    Attributes:
        conv_width: Tokens that the convolution before it sees, each itself included.
        by_key_head: The checkpoint has the features of a key head beside those of its value heads, not all queries
            before all keys.
        gates_by_key_head: It has strengths and steps so, whether it has the other features so or not.
        values_by_turns: Its value heads stand by turns: the first of each key head, then the second of each.
    """

    sizes: DeltaSizes
    conv_width: int
    by_key_head: bool = False
    gates_by_key_head: bool = False
    values_by_turns: bool = False

    @property
    def _num_values(self) -> int:
        return self.sizes.num_value_heads * self.sizes.value_dim

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections to queries, keys, values and gates, and from the heads back."""
        return {
            "output": to_stream("linear_attn.out_proj", hidden_size, self._num_values),
            "inputs": self._inputs(hidden_size),
            "gates": self._gates(hidden_size),
        }

    def _inputs(self, hidden_size: int) -> LinearShape:
        sizes, num_keys = self.sizes, self.sizes.num_key_heads * self.sizes.key_dim
        modules: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
        rows: tuple[int, ...] = (sizes.num_features, self._num_values)
        order: torch.Tensor | None = None
        if self.by_key_head:
            modules, rows, values = ("in_proj_qkvz",), (sum(rows),), self._num_values // sizes.num_key_heads
            order = _order_of_parts(sizes.num_key_heads, (sizes.key_dim, sizes.key_dim, values, values))
        elif self.values_by_turns:
            turns = self._value_order(sizes.value_dim)
            order = _behind(2 * num_keys, turns, turns)
        return LinearShape(
            tuple(f"linear_attn.{module}" for module in modules),
            rows,
            hidden_size,
            Partition.COLUMN,
            order=order,
            parts=(num_keys, num_keys, self._num_values, self._num_values),
        )

    def _gates(self, hidden_size: int) -> LinearShape:
        num_heads, num_key_heads = self.sizes.num_value_heads, self.sizes.num_key_heads
        modules: tuple[str, ...] = ("in_proj_b", "in_proj_a")
        rows: tuple[int, ...] = (num_heads, num_heads)
        order: torch.Tensor | None = None
        if self.by_key_head or self.gates_by_key_head:
            ratio = num_heads // num_key_heads
            modules, rows, order = ("in_proj_ba",), (2 * num_heads,), _order_of_parts(num_key_heads, (ratio, ratio))
        elif self.values_by_turns:
            heads = self._value_order(1)
            order = _behind(0, heads, heads)
        # A state adds their errors up.
        return LinearShape(
            tuple(f"linear_attn.{module}" for module in modules),
            rows,
            hidden_size,
            Partition.COLUMN,
            order=order,
            parts=(num_heads, num_heads),
            is_rounded=False,
        )

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps: the last inputs of the convolution, and a matrix a head."""
        return matrix_memory(self.conv_width, self.sizes)

    def take(self, source: LayerSource, prefix: str) -> GatedDeltaWeights:
        """Take the weights of the layer `prefix`."""
        name, sizes, checkpoint = f"{prefix}.linear_attn", self.sizes, source.checkpoint
        shapes = self.linears(source.block.names, source.hidden_size)
        rate = checkpoint.take_float32(f"{name}.A_log", sizes.num_value_heads).exp()
        step_bias = checkpoint.take_float32(f"{name}.dt_bias", sizes.num_value_heads)
        conv = checkpoint.take(f"{name}.conv1d.weight", sizes.num_features, 1, self.conv_width)[:, 0]
        linears = source.linears(prefix, shapes)
        output = linears["output"]
        if self.values_by_turns:
            heads, turns = self._value_order(1), self._value_order(sizes.value_dim)
            rate, step_bias = (tensor[heads.to(tensor.device)] for tensor in (rate, step_bias))
            conv = conv[_behind(sizes.num_features - self._num_values, turns).to(conv.device)]
            output = replace(output, weight=reorder_columns(whole(output.weight), turns))
        return GatedDeltaWeights(
            shape=self,
            inputs=linears["inputs"],
            gates=linears["gates"],
            conv=conv.t().contiguous(),
            delta=DeltaWeights(rate, step_bias),
            norm=checkpoint.take(f"{name}.norm.weight", sizes.value_dim),
            eps=source.eps,
            output=output,
        )

    def _value_order(self, width: int) -> torch.Tensor:
        """Return where features of value heads by turns are, `width` of each, when those of a key head meet."""
        num_heads, num_key_heads = self.sizes.num_value_heads, self.sizes.num_key_heads
        by_turns = torch.arange(num_heads * width).view(num_heads // num_key_heads, num_key_heads, width)
        return by_turns.transpose(0, 1).flatten()


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """A gated delta net.

    Attributes:
        inputs: Yields queries, keys, values, then the gates of the output.
        gates: Yields the strengths of the value heads, then their steps.
        conv: `[conv_width, num_features]`, of queries, keys and values.
        norm: `[value_dim]`, of the vectors read.
    """

    shape: GatedDeltaShape
    inputs: Projection
    gates: Projection
    conv: torch.Tensor
    delta: DeltaWeights
    norm: torch.Tensor
    eps: float
    output: Projection

    def block(self, parts: LayerParts, index: int) -> GatedDeltaNet:
        """Make the block; `index` is the layer's number, by which it finds its state."""
        return GatedDeltaNet(index, self, *map(parts.linear, (self.inputs, self.gates, self.output)))


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaNet:
    """Mixes tokens through a state of fixed size.

    Source: Yang et al., arXiv 2412.06464, section 3.4.
    """

    index: int
    weights: GatedDeltaWeights
    inputs: Linear
    gates: Linear
    output: Linear

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Take the state of each sequence through its tokens, and return what they read of it."""
        num_tokens, weights = x.shape[0], self.weights
        state, rows = context.state_of(self.index)
        features, gates = self.inputs(x, context), self.gates(x, context)
        mixed, output_gate = features.tensor_split((weights.shape.sizes.num_features,), dim=1)
        if rows.num_kept is not None:
            state.keep_drafts(rows, torch.cat((mixed, gates), dim=1))
        read = self._recur(mixed, gates, state, rows)
        normed = rms_norm(read.view(-1, read.shape[-1]), weights.norm, weights.eps).view(num_tokens, -1)
        return self.output(normed * activate(output_gate, Activation.SILU), context)

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Advance states by tokens computed before; `inputs`, as they were kept, is `[num_tokens, num_inputs]`."""
        inputs = inputs.to(self.weights.conv.dtype)
        mixed, gates = inputs.tensor_split((self.weights.shape.sizes.num_features,), dim=1)
        self._recur(mixed, gates, state, rows)

    def _recur(self, mixed: torch.Tensor, gates: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        weights, (inputs, matrices) = self.weights, state.parts
        qkv = causal_conv(mixed, weights.conv, None, inputs, rows)
        return gated_delta(StateStep(qkv, gates, weights.delta, weights.shape.sizes, matrices, rows))


def _behind(count: int, *orders: torch.Tensor) -> torch.Tensor:
    """Return the order of features of which the first `count` stay, and the parts behind have orders of their own."""
    parts = [torch.arange(count)]
    for order in orders:
        parts.append(order + sum(map(len, parts)))
    return torch.cat(parts)


def _order_of_parts(num_heads: int, widths: Sequence[int]) -> torch.Tensor:
    """Return the order that puts features which stand head by head, in parts, part by part."""
    by_head = torch.arange(num_heads * sum(widths)).view(num_heads, -1)
    return torch.cat([part.reshape(-1) for part in by_head.split_with_sizes(list(widths), dim=1)])
