"""What each layer keeps of a sequence's past, and which layers are kept alike: a description, no memory.

Layers that need the same tokens form a group, which has blocks and a block table of its own:

- group 0 keeps all tokens. It is always there: where no layer needs all tokens its blocks take no memory, and only
  count tokens;
- one more group for each size of sliding window, which keeps the last tokens;
- the state group: layers that keep a fixed number of bytes of a sequence, however long it is.

`LayerState` is the state of a recurrent layer, with the drafts whose part in it is not decided yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kernels.gated_delta import DeltaSizes
from kernels.layer_cache import CacheShape
from kernels.ssd import SsdSizes
from kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class KeepsTokens:
    """A layer with a row of keys and values for each token.

    Attributes:
        window: How many of the last tokens are ever read, the token itself included; None is all.
    """

    shape: CacheShape
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ReadsLayer:
    """A layer that reads what an earlier one has written, and writes nothing; `layer` keeps tokens."""

    layer: int


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor of a layer's state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its memory."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KeepsState:
    """A recurrent layer: a few tensors for a sequence, which each token changes.

    Attributes:
        num_inputs: Numbers that the layer computes of a token before it comes to the state. They are kept of drafts
            until it is known which of them stand.
    """

    parts: tuple[StatePart, ...]
    num_inputs: int = 0


@dataclass(frozen=True, slots=True)
class KeepsBoth:
    """A layer that attends and has a state too."""

    tokens: KeepsTokens
    state: KeepsState


LayerMemory = KeepsTokens | ReadsLayer | KeepsState | KeepsBoth | None
"""What a layer keeps; None is nothing."""


def matrix_memory(conv_width: int, sizes: DeltaSizes | SsdSizes) -> KeepsState:
    """Describe the last inputs of a convolution, and a matrix a head; of drafts what the projections yield of them."""
    inputs = StatePart((conv_width - 1, sizes.num_features), torch.float32)
    return KeepsState((inputs, StatePart(sizes.state_shape, torch.float32)), sizes.num_features + sizes.num_gates)


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Layers that keep the same tokens.

    Attributes:
        window: Of all its layers; None keeps all tokens.
        layers: Those that have memory of their own, in order.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """The layers of one model."""

    layers: tuple[LayerMemory, ...]

    def __post_init__(self) -> None:
        for layer, memory in enumerate(self.layers):
            if isinstance(memory, ReadsLayer):
                assert memory.layer < layer, "a layer reads what a layer before it has written"
                assert self.tokens_of(memory.layer) is not None

    @cached_property
    def groups(self) -> tuple[TokenGroup, ...]:
        """The groups of layers that keep tokens: that of all tokens, then those of windows, small ones first."""
        layers: dict[int | None, list[int]] = {None: []}
        for layer in range(len(self.layers)):
            if (memory := self.tokens_of(layer)) is not None:
                layers.setdefault(memory.window, []).append(layer)
        windows = sorted(window for window in layers if window is not None)
        return tuple(TokenGroup(window, tuple(layers[window])) for window in (None, *windows))

    @cached_property
    def group_of_layer(self) -> tuple[int | None, ...]:
        """For each layer the number of the group whose blocks it reads; None where it reads none."""
        groups = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        return tuple(
            groups.get(memory.layer if isinstance(memory, ReadsLayer) else layer)
            for layer, memory in enumerate(self.layers)
        )

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """The layers of the state group."""
        return tuple(layer for layer in range(len(self.layers)) if self.state_of(layer) is not None)

    @property
    def state_bytes(self) -> int:
        """What the state of one sequence takes, over all layers; 0 without recurrent layers."""
        return sum(part.num_bytes for state in self.states for part in state.parts)

    @property
    def states(self) -> list[KeepsState]:
        """What the layers of the state group keep, in order."""
        return [state for layer in self.state_layers if (state := self.state_of(layer)) is not None]

    def tokens_of(self, layer: int) -> KeepsTokens | None:
        """Return what a layer keeps of tokens, if anything."""
        memory = self.layers[layer]
        memory = memory.tokens if isinstance(memory, KeepsBoth) else memory
        return memory if isinstance(memory, KeepsTokens) else None

    def state_of(self, layer: int) -> KeepsState | None:
        """Return the state that a layer keeps, if any."""
        memory = self.layers[layer]
        memory = memory.state if isinstance(memory, KeepsBoth) else memory
        return memory if isinstance(memory, KeepsState) else None

    def shape_of(self, layer: int) -> CacheShape:
        """Return what a layer that keeps tokens keeps of each."""
        memory = self.tokens_of(layer)
        assert memory is not None
        return memory.shape

    def flat(self) -> CacheLayout:
        """Return the layout that keeps all tokens where this one keeps the last ones; masks still hide them."""
        return CacheLayout(tuple(_whole(memory, 1) for memory in self.layers))

    def within(self, max_model_len: int) -> CacheLayout:
        """Return the layout for sequences up to a length: windows that hold all of that keep all tokens."""
        return CacheLayout(tuple(_whole(memory, max_model_len) for memory in self.layers))


def _whole(memory: LayerMemory, min_window: int) -> LayerMemory:
    if isinstance(memory, KeepsBoth):
        return replace(memory, tokens=_whole_tokens(memory.tokens, min_window))
    return _whole_tokens(memory, min_window) if isinstance(memory, KeepsTokens) else memory


def _whole_tokens(memory: KeepsTokens, min_window: int) -> KeepsTokens:
    return KeepsTokens(memory.shape) if (memory.window or 0) >= min_window else memory


@dataclass(frozen=True, slots=True)
class LayerState:
    """The memory of one layer. Kernels update it in place, so that its addresses never change.

    Attributes:
        parts: Tensors of the state, `[num_slots, ...]` float32 each.
        drafts: `[num_slots, max_draft_tokens, num_inputs]` float32: what the layer computed of the draft tokens of a
            sequence's last step, before it came to the state. None where no drafts are verified.
    """

    parts: tuple[torch.Tensor, ...]
    drafts: torch.Tensor | None

    def keep_drafts(self, rows: StateRows, inputs: torch.Tensor) -> None:
        """Keep what the layer computed of tokens that the state is not to remember yet.

        The shapes of the operations do not depend on the number of drafts, so they can be captured.

        Shapes:
            inputs: `[num_tokens, num_inputs]`
        """
        if self.drafts is None or rows.num_kept is None:
            return
        first = (rows.query_starts[:-1] + rows.num_kept).long()
        tokens = first[:, None] + torch.arange(self.drafts.shape[1], device=inputs.device)
        # Behind a sequence's drafts stands anything; it is never read.
        tokens.clamp_(max=len(inputs) - 1)
        kept = inputs.index_select(0, tokens.view(-1)).to(self.drafts.dtype)
        self.drafts.index_copy_(0, rows.slots, kept.view(len(rows.slots), *self.drafts.shape[1:]))

    def kept_drafts(self, places: torch.Tensor) -> torch.Tensor:
        """Return the values kept of some drafts.

        Shapes:
            places: `[num_tokens]` int64, `slot * max_draft_tokens + number`
            result: `[num_tokens, num_inputs]` float32
        """
        assert self.drafts is not None, "no drafts were kept"
        return self.drafts.flatten(0, 1).index_select(0, places)
