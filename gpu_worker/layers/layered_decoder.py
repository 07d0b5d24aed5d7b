"""The decoder operation by operation: a stack of layers, each a mixer and a feed-forward block, over one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from gpu_worker.core.step_interrupt import StepInterrupt
from gpu_worker.layers.adapters import EmbeddingAdapters
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.cache_layout import LayerState
from gpu_worker.layers.layer import DecoderLayer, LayerWeights, MixerBlock
from gpu_worker.layers.layer_inputs import LayerInputs
from gpu_worker.layers.linear import LayerParts
from gpu_worker.layers.mixture import ExpertLoads
from gpu_worker.layers.norms import NormWeights, make_norm
from gpu_worker.layers.vocabulary import Embedding
from kernels.state_rows import StateRows


class DecoderForm(Protocol):
    """Embedding, layers and final normalisation, in the form that is fastest on the device."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Compute a step: write the tokens' keys and values into the cache, return their hidden vectors.

        Shapes:
            token_ids, positions: `[num_tokens]` int64
            result: `[num_tokens, hidden_size]`, normalised; behind it, as further columns, the streams before the
                layers that are tapped
        """


class PostNormLayer:
    """A mixer and a feed-forward block, each followed by the normalisation of the stream with what it adds.

    Source: Vaswani et al., arXiv 1706.03762, section 3.1.
    """

    tokens_per_expert: torch.Tensor | None = None

    def __init__(self, index: int, weights: LayerWeights, parts: LayerParts) -> None:
        norms = weights.norms
        assert weights.mixer is not None
        assert weights.feed_forward is not None
        assert norms.after_mixer is not None
        assert norms.after_feed_forward is not None
        assert (weights.layer_input, weights.residual_scale, weights.stream_scale) == (None, 1, 1)
        self._mixer: MixerBlock = parts.mixer(weights.mixer, index)
        self._feed_forward = weights.feed_forward.block(parts)
        self._after_mixer = make_norm(norms.after_mixer)
        self._after_feed_forward = make_norm(norms.after_feed_forward)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        context: AttentionContext,
        layer_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the stream behind the layer, whole: nothing is left to add."""
        assert residual is None
        assert layer_input is None
        x = self._after_mixer.add(self._mixer(x, positions, context), x)
        return self._after_feed_forward.add(self._feed_forward(x, context), x), None

    def replay(self, places: torch.Tensor, state: LayerState | None, rows: StateRows) -> None:
        """Do nothing: such layers have no states."""
        assert state is None


def _layer(index: int, weights: LayerWeights, parts: LayerParts) -> DecoderLayer | PostNormLayer:
    return (PostNormLayer if weights.is_post_norm else DecoderLayer)(index, weights, parts)


class LayeredDecoder:
    """Holds weights only: every call's state is in its arguments.

    Attributes:
        placed_experts: The experts, by layers, that move between ranks.
    """

    def __init__(
        self,
        embedding: Callable[[torch.Tensor], torch.Tensor],
        layers: Iterable[LayerWeights],
        final_norm: NormWeights | None,
        parts: LayerParts,
        tapped_layers: Sequence[int] = (),
        layer_inputs: LayerInputs | None = None,
        positions: Embedding | None = None,
        embedding_adapters: EmbeddingAdapters | None = None,
    ) -> None:
        self._embedding_adapters = embedding_adapters
        self._embedding = embedding
        self.placed_experts = parts.placed
        self._layers = [_layer(index, weights, parts) for index, weights in enumerate(layers)]
        self._norm = None if final_norm is None else make_norm(final_norm)
        self._tapped_layers = tapped_layers
        self._layer_inputs = layer_inputs
        self._positions = positions
        self._interrupt: StepInterrupt | None = None

    def interrupt_by(self, interrupt: StepInterrupt) -> None:
        """From now on compute no further layer of a step with prompts that is asked to end, and return anything."""
        self._interrupt = interrupt

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what `DecoderForm` promises."""
        x, residual = self._embedding(token_ids), None
        if context.adapters is not None and self._embedding_adapters is not None:
            self._embedding_adapters.add(token_ids, x, context.adapters)
        if self._positions is not None:
            x.add_(self._positions(positions))
        media = context.media
        if media is not None:
            x.index_copy_(0, media.places, media.rows)
        streams: dict[int, torch.Tensor] = {}
        # Before the first layer, which makes the embeddings the stream and adds to them in place.
        inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, x, media, context.adapters)
        interrupt = self._interrupt
        for index, layer in enumerate(self._layers):
            if interrupt is not None and interrupt.is_asked:
                return x
            if index in self._tapped_layers:
                streams[index] = x.clone() if residual is None else x + residual
            x, residual = layer(x, residual, positions, context, None if inputs is None else inputs[index])
            if media is not None and index < len(media.deep):
                x.index_add_(0, media.places, media.deep[index])
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
