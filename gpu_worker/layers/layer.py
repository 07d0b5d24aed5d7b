"""One layer of a decoder: a mixer and a feed-forward block, with the normalisations around them.

A kind of either is a file of this room. Its shape is a value: sizes and options, the linear layers that it declares,
what it keeps, and how its weights are taken from a checkpoint. Its weights make its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.cache_layout import LayerMemory, LayerState
from gpu_worker.layers.dense_and_mixture import DenseAndMixture, DenseAndMixtureShape
from gpu_worker.layers.layer_inputs import LayerInputWeights
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, LinearShape, declare_experts, declare_matrix
from gpu_worker.layers.mixture import Mixture, MixtureShape
from gpu_worker.layers.mlp import GatedShape, PlainShape
from gpu_worker.layers.norms import NormWeights, make_norm, normalised
from kernels.linear.rounding import InputRounding, Rows
from kernels.state_rows import StateRows


class MixerBlock(Protocol):
    """Mixes the tokens of a sequence: attention, or a recurrence."""

    def __call__(self, x: Any, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Read `x: [num_tokens, hidden_size]`, keep what later tokens need, and return the result to add.

        A block that `TakesRounded` may be given rounded rows.
        """


@runtime_checkable
class RecurrentBlock(MixerBlock, Protocol):
    """A mixer with a state that tokens change."""

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Take states through tokens whose `inputs`, `[num_tokens, num_inputs]`, were computed before."""


@runtime_checkable
class TakesRounded(Protocol):
    """A mixer or a feed-forward block whose input may be rounded by the normalisation before it."""

    def rounding(self, context: AttentionContext) -> InputRounding | None:
        """Return how; None where it is wanted as it is."""


class FeedForwardBlock(Protocol):
    """What transforms each token by itself."""

    def __call__(self, x: Any, context: AttentionContext) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`, or rounded rows if it `TakesRounded`."""


class MixerWeights(Protocol):
    """The weights of a mixer, as a checkpoint gives them."""

    def block(self, parts: LayerParts, index: int) -> MixerBlock:
        """Make the block; `index` is the layer's number, by which it finds its cache or its state."""


class FeedForwardWeights(Protocol):
    """The weights of a feed-forward block, as a checkpoint gives them."""

    def block(self, parts: LayerParts) -> FeedForwardBlock:
        """Make the block."""


class FeedForwardShape(Protocol):
    """What a layer does to each token alone."""

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare its linear layers, but for those of experts, by the names that its weights have for them."""

    def take(self, source: LayerSource, prefix: str) -> FeedForwardWeights:
        """Take its weights of the layer `prefix`, `model.layers.3`."""


class MixerShape(Protocol):
    """What a layer mixes tokens by."""

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare its linear layers, by the names that its weights have for them."""

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps of a sequence's past."""

    def take(self, source: LayerSource, prefix: str) -> MixerWeights:
        """Take its weights of the layer `prefix`, `model.layers.3`."""


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """One layer. Either part may be absent, in models whose layers have one block each."""

    mixer: MixerShape | None
    feed_forward: FeedForwardShape | None

    @property
    def dense(self) -> GatedShape | PlainShape | None:
        """The block that all tokens get, also one beside experts."""
        block = self.feed_forward.dense if isinstance(self.feed_forward, DenseAndMixtureShape) else self.feed_forward
        return block if isinstance(block, GatedShape | PlainShape) else None

    @property
    def mixture(self) -> MixtureShape | None:
        """The experts, also those beside a dense block."""
        block = self.feed_forward.mixture if isinstance(self.feed_forward, DenseAndMixtureShape) else self.feed_forward
        return block if isinstance(block, MixtureShape) else None

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the linear layers of both parts, but for those of experts."""
        parts = [part for part in (self.mixer, self.feed_forward) if part is not None]
        return {name: linear for part in parts for name, linear in part.linears(names, hidden_size).items()}

    def declare(self, source: LayerSource, prefix: str, targets: AdapterTargets) -> None:
        """Let adapters be beside the matrices of the layer `prefix`, which another stage has."""
        shapes = self.linears(source.block.names, source.hidden_size)
        if self.mixture is not None:
            shapes["router"] = self.mixture.router_of(source, prefix)
            declare_experts(targets, self.mixture.modules_of(source, prefix))
        for shape in shapes.values():
            if not shape.is_absorbed:
                declare_matrix(targets, prefix, shape, is_elsewhere=True)

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps of a sequence's past."""
        return None if self.mixer is None else self.mixer.memory()

    def take(self, source: LayerSource, prefix: str, *, is_bare: bool = False) -> LayerWeights:
        """Take the weights of the layer `prefix`; a bare one has no normalisation of what its mixer reads."""
        block, names, (mixer, feed_forward) = source.block, source.block.names, (self.mixer, self.feed_forward)

        def norm(name: str | None, part: object) -> NormWeights | None:
            return None if name is None or part is None else source.norm(f"{prefix}.{name}")

        norms = LayerNorms(
            None if is_bare else norm(names.before_mixer, mixer),
            norm(names.after_mixer, mixer),
            norm(names.before_feed_forward, feed_forward),
            norm(names.after_feed_forward, feed_forward),
        )
        return LayerWeights(
            None if mixer is None else mixer.take(source, prefix),
            None if feed_forward is None else feed_forward.take(source, prefix),
            norms,
            block.is_parallel,
            block.residual_scale,
            source.checkpoint.take(f"{prefix}.{names.stream_scale}", 1).item() if names.stream_scale else 1.0,
            None if block.layer_inputs is None else LayerInputWeights.take(source, prefix, block.layer_inputs),
            block.is_post_norm,
        )


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The normalisations around a layer's two blocks; None where there is none."""

    before_mixer: NormWeights | None = None
    after_mixer: NormWeights | None = None
    before_feed_forward: NormWeights | None = None
    after_feed_forward: NormWeights | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Everything that distinguishes a layer.

    Attributes:
        is_parallel: The feed-forward block reads what the mixer reads, rather than what the mixer has added to.
        residual_scale: What both blocks add is multiplied by this.
        stream_scale: The residual stream behind the layer is multiplied by this.
        layer_input: Of the layer's input of each token, in models that have such.
        is_post_norm: The normalisations behind both are of the stream with what they add.
    """

    mixer: MixerWeights | None
    feed_forward: FeedForwardWeights | None
    norms: LayerNorms
    is_parallel: bool = False
    residual_scale: float = 1.0
    stream_scale: float = 1.0
    layer_input: LayerInputWeights | None = None
    is_post_norm: bool = False


class DecoderLayer:
    """The blocks of one layer, with the normalisations before and after each."""

    def __init__(self, index: int, weights: LayerWeights, parts: LayerParts) -> None:
        norms = weights.norms
        self._norms = [
            None if norm is None else make_norm(norm)
            for norm in (norms.before_mixer, norms.after_mixer, norms.before_feed_forward, norms.after_feed_forward)
        ]
        self._mixer: MixerBlock | None = None if weights.mixer is None else parts.mixer(weights.mixer, index)
        self._feed_forward = None if weights.feed_forward is None else weights.feed_forward.block(parts)
        assert self._mixer is not None or self._feed_forward is not None, "a layer has a block"
        self._is_parallel = weights.is_parallel
        # What two blocks read stays as it is.
        blocks: tuple[object, ...] = (self._mixer, self._feed_forward)
        self._rounded_blocks = [
            block if isinstance(block, TakesRounded) and not weights.is_parallel else None for block in blocks
        ]
        self._residual_scale = weights.residual_scale
        self._stream_scale = weights.stream_scale
        self._layer_input = None if weights.layer_input is None else weights.layer_input.block(parts)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        context: AttentionContext,
        layer_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's last contribution, not added yet, and the residual stream before it.

        Args:
            x: The previous layer's contribution, or the embeddings.
            residual: The stream to add it to, in place; None at the first layer, where `x` becomes the stream.
            positions: Of the step's tokens.
            context: The step's batch.
            layer_input: What the layer is given of each token, in models that have such.

        Shapes:
            x, residual, both results: `[num_tokens, hidden_size]`
            layer_input: `[num_tokens, size]`
        """
        first = 1 if self._mixer is None else 0
        rows = normalised(self._norms[2 * first], x, residual, self._rounding(first, context))
        residual = x if residual is None else residual
        x = self.add_to(residual, rows, positions, context)
        if self._layer_input is not None:
            assert layer_input is not None, "the layer has an input of each token"
            x = self._layer_input(residual.add_(x), layer_input, context)
        if self._stream_scale != 1:
            x, residual = x * self._stream_scale, residual.mul_(self._stream_scale)
        return x, residual

    def replay(self, places: torch.Tensor, state: LayerState | None, rows: StateRows) -> None:
        """Take the layer's states, if it has any, through draft tokens that lie at `places` of those it kept."""
        if state is not None:
            assert isinstance(self._mixer, RecurrentBlock)
            self._mixer.replay(state.kept_drafts(places), state, rows)

    @property
    def tokens_per_expert(self) -> torch.Tensor | None:
        """Counts of the layer's mixture, `[num_experts]` int64; None where it has none."""
        block = self._feed_forward
        return block.tokens_per_expert if isinstance(block, Mixture | DenseAndMixture) else None

    def add_to(
        self, residual: torch.Tensor, x: Rows, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Add what the first block makes of `x` to the stream, in place; return the layer's last contribution."""
        _, after_mixer, before_feed_forward, after_feed_forward = self._norms
        if self._mixer is not None:
            mixed = self._mixer(x, positions, context)
            mixed = self._scaled(mixed if after_mixer is None else after_mixer(mixed))
            if self._feed_forward is None:
                return mixed
            if self._is_parallel:
                x = x if before_feed_forward is None else before_feed_forward(residual)
                residual.add_(mixed)
            else:
                x = normalised(before_feed_forward, mixed, residual, self._rounding(1, context))
        assert self._feed_forward is not None
        result = self._feed_forward(x, context)
        return self._scaled(result if after_feed_forward is None else after_feed_forward(result))

    def _rounding(self, index: int, context: AttentionContext) -> InputRounding | None:
        block = self._rounded_blocks[index]
        return None if block is None else block.rounding(context)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._residual_scale == 1 else x.mul_(self._residual_scale)
