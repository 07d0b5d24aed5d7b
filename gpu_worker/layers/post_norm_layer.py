"""A layer that normalises the stream behind each of its blocks, as the first transformers did."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.layer_norm import make_norm
from gpu_worker.layers.layer_state import LayerState
from gpu_worker.layers.linear import LayerParts
from kernels.state_rows import StateRows


class PostNormLayer:
    """A mixer and a feed-forward block, each followed by the normalisation of the stream with what it adds.

    Source: Vaswani et al., arXiv 1706.03762, section 3.1.
    """

    __slots__ = ("_after_feed_forward", "_after_mixer", "_feed_forward", "_mixer")

    def __init__(self, index: int, weights: LayerWeights, parts: LayerParts) -> None:
        """Take the layer's weights; `index` chooses its KV cache, `parts` makes its blocks."""
        norms = weights.norms
        assert weights.mixer is not None
        assert weights.feed_forward is not None
        assert norms.after_mixer is not None
        assert norms.after_feed_forward is not None
        assert (weights.layer_input, weights.residual_scale, weights.stream_scale) == (None, 1, 1)
        self._mixer = weights.mixer.block(parts, index)
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
        """Return the stream behind the layer, whole: nothing is left to add.

        Args:
            x: The stream before the layer, which is overwritten.
            residual: None.
            positions: Of the step's tokens.
            context: The step's batch.
            layer_input: None.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
        """
        assert residual is None
        assert layer_input is None
        x = self._after_mixer.add(self._mixer(x, positions, context), x)
        return self._after_feed_forward.add(self._feed_forward(x, context), x), None

    def replay(self, places: torch.Tensor, state: LayerState | None, rows: StateRows) -> None:
        """Do nothing: such layers have no states."""
        assert state is None

    @property
    def tokens_per_expert(self) -> torch.Tensor | None:
        """None: such layers have no mixtures."""
        return None
