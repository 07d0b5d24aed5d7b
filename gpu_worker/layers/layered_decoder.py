"""The decoder operation by operation: a stack of layers, each a mixer and a feed-forward block, over one stream."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.dense_and_mixture import DenseAndMixture
from gpu_worker.layers.embedding import Embedding, NormedEmbedding
from gpu_worker.layers.expert_loads import ExpertLoads
from gpu_worker.layers.layer_inputs import LayerInputs
from gpu_worker.layers.layer_norm import make_norm
from gpu_worker.layers.layer_parts import LayerParts, RecurrentBlock
from gpu_worker.layers.layer_state import LayerState
from gpu_worker.layers.layer_weights import LayerWeights, NormWeights
from gpu_worker.layers.mixture import Mixture
from gpu_worker.layers.post_norm_layer import PostNormLayer
from kernels.state_rows import StateRows


class DecoderLayer:
    """The blocks of one layer, with the normalisations before and after each."""

    __slots__ = (
        "_feed_forward",
        "_is_parallel",
        "_layer_input",
        "_mixer",
        "_norms",
        "_residual_scale",
        "_stream_scale",
    )

    def __init__(self, index: int, weights: LayerWeights, parts: LayerParts) -> None:
        """Take the layer's weights; `index` chooses its KV cache, `parts` makes its blocks."""
        norms = weights.norms
        self._norms = [
            None if norm is None else make_norm(norm)
            for norm in (norms.before_mixer, norms.after_mixer, norms.before_feed_forward, norms.after_feed_forward)
        ]
        self._mixer = None if weights.mixer is None else parts.mixer(index, weights.mixer)
        self._feed_forward = None if weights.feed_forward is None else parts.feed_forward(weights.feed_forward)
        assert self._mixer is not None or self._feed_forward is not None, "a layer has a block"
        self._is_parallel = weights.is_parallel
        self._residual_scale = weights.residual_scale
        self._stream_scale = weights.stream_scale
        self._layer_input = None if weights.layer_input is None else parts.layer_input(weights.layer_input)

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
        norm = self._norms[0] if self._mixer is not None else self._norms[2]
        if residual is None:
            residual = x
            x = x if norm is None else norm(x)
        else:
            x = residual.add_(x) if norm is None else norm.add(x, residual)
        x = self.add_to(residual, x, positions, context)
        if self._layer_input is not None:
            assert layer_input is not None, "the layer has an input of each token"
            x = self._layer_input(residual.add_(x), layer_input)
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
        self, residual: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext
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
            elif before_feed_forward is None:
                x = residual.add_(mixed)
            else:
                x = before_feed_forward.add(mixed, residual)
        assert self._feed_forward is not None
        x = self._feed_forward(x)
        return self._scaled(x if after_feed_forward is None else after_feed_forward(x))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._residual_scale == 1 else x.mul_(self._residual_scale)


def _layer(index: int, weights: LayerWeights, parts: LayerParts) -> DecoderLayer | PostNormLayer:
    return (PostNormLayer if weights.is_post_norm else DecoderLayer)(index, weights, parts)


class LayeredDecoder:
    """Holds weights only: every call's state is in its arguments."""

    __slots__ = ("_embedding", "_layer_inputs", "_layers", "_norm", "_positions", "_tapped_layers")

    def __init__(
        self,
        embedding: Embedding | NormedEmbedding,
        layers: Iterable[LayerWeights],
        final_norm: NormWeights | None,
        parts: LayerParts,
        tapped_layers: Sequence[int] = (),
        layer_inputs: LayerInputs | None = None,
        positions: Embedding | None = None,
    ) -> None:
        """Make the layers by `parts`; the streams before those that are tapped are returned too."""
        self._embedding = embedding
        self._layers = [_layer(index, weights, parts) for index, weights in enumerate(layers)]
        self._norm = None if final_norm is None else make_norm(final_norm)
        self._tapped_layers = tapped_layers
        self._layer_inputs = layer_inputs
        self._positions = positions

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what `DecoderForm` promises."""
        x, residual = self._embedding(token_ids), None
        if self._positions is not None:
            x.add_(self._positions(positions))
        streams: dict[int, torch.Tensor] = {}
        # Before the first layer, which makes the embeddings the stream and adds to them in place.
        inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, x)
        for index, layer in enumerate(self._layers):
            if index in self._tapped_layers:
                streams[index] = x.clone() if residual is None else x + residual
            x, residual = layer(x, residual, positions, context, None if inputs is None else inputs[index])
        if self._norm is None:
            result = x if residual is None else residual.add_(x)
        else:
            result = self._norm(x) if residual is None else self._norm.add(x, residual)
        return torch.cat((result, *(streams[index] for index in self._tapped_layers)), 1) if streams else result

    def replay_drafts(self, places: torch.Tensor, states: Sequence[LayerState | None], rows: StateRows) -> None:
        """Do what `CausalLM.replay_drafts` promises."""
        for layer, state in zip(self._layers, states, strict=True):
            layer.replay(places, state, rows)

    def expert_loads(self) -> ExpertLoads | None:
        """Return what reads how tokens fall on experts; None where there are no mixtures."""
        counters = [counter for layer in self._layers if (counter := layer.tokens_per_expert) is not None]
        return ExpertLoads(counters) if counters else None

    def first(self, num_layers: int) -> LayeredDecoder:
        """Do what `DecoderForm` promises."""
        short = copy.copy(self)
        short._layers = self._layers[:num_layers]
        short._tapped_layers = ()
        return short
