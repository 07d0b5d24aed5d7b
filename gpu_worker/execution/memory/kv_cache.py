"""The memory that holds keys and values, in blocks, and recurrent states, in slots of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

import torch

from gpu_worker.core.scheduler_config import WindowConfig
from gpu_worker.execution.memory.budget import CacheDemand
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.cache_layout import CacheLayout, LayerState, ReadsLayer
from gpu_worker.models.config import ModelConfig
from kernels.layer_cache import EVERY_TOKEN, CachedTokens, CacheShape, LayerCache, StackedCaches, allocate_caches
from shared.errors import ConfigError

_NOTHING = CacheShape(1, 0, 0)


@dataclass(frozen=True, slots=True)
class GroupCache:
    """The caches of a group of layers, which have the same blocks; layers of one shape are stacked."""

    num_blocks: int
    stacks: tuple[StackedCaches, ...]


@dataclass(frozen=True, slots=True)
class KVCache:
    """The caches of all layers: one by one, and by group.

    Attributes:
        layers: In order; a layer that reads another's has the same, one that keeps no tokens has one of no bytes.
        groups: Those of the layout, in its order.
        block_size: Tokens of sequences that a block stands for; it has room for the `tokens` among them.
        part: Which of `num_parts` equal parts of all blocks these are; the others are elsewhere.
    """

    layers: Sequence[LayerCache]
    groups: tuple[GroupCache, ...]
    layout: CacheLayout
    block_size: int
    device: torch.device
    tokens: CachedTokens = EVERY_TOKEN
    part: int = 0
    num_parts: int = 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the group that keeps all tokens."""
        return self.groups[0].num_blocks

    @property
    def windows(self) -> tuple[WindowConfig, ...]:
        """The groups of layers that keep the last tokens, as the scheduler knows them."""
        groups = zip(self.layout.groups, self.groups, strict=True)
        return tuple(
            WindowConfig(group.window, cache.num_blocks) for group, cache in groups if group.window is not None
        )


def allocate_kv_cache(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate a cache of type `dtype` that keeps all tokens of all layers. Its contents are undefined."""
    return allocate_groups(model.cache_layout.flat(), [num_blocks], block_size, dtype, device)


def allocate_groups(
    layout: CacheLayout,
    num_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: CachedTokens = EVERY_TOKEN,
    part: int = 0,
    num_parts: int = 1,
) -> KVCache:
    """Allocate blocks of each group for keys and values of type `dtype`. Their contents are undefined."""
    room = block_size // tokens.step
    nothing = allocate_caches(1, 1, room, _NOTHING, dtype, device).layers()[0]
    layers, groups = [nothing] * len(layout.layers), []
    for group, count in zip(layout.groups, num_blocks, strict=True):
        stacks = []
        by_shape = sorted(group.layers, key=lambda layer: astuple(layout.shape_of(layer)))
        for shape, alike in groupby(by_shape, key=layout.shape_of):
            members = list(alike)
            stacks.append(allocate_caches(len(members), count, room, shape, dtype, device))
            for layer, cache in zip(members, stacks[-1].layers(), strict=True):
                layers[layer] = cache
        groups.append(GroupCache(count, tuple(stacks)))
    for layer, memory in enumerate(layout.layers):
        if isinstance(memory, ReadsLayer):
            layers[layer] = layers[memory.layer]
    return KVCache(layers, tuple(groups), layout, block_size, device, tokens, part, num_parts)


def bytes_per_block(block_size: int, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory of one block that keeps tokens of all layers, scales included."""
    return sum(group_block_bytes(model.cache_layout.flat(), block_size, dtype))


def group_block_bytes(layout: CacheLayout, block_size: int, dtype: torch.dtype) -> list[int]:
    """Return for each group the memory of one block over its layers, scales included."""
    meta = torch.device("meta")
    return [
        sum(
            allocate_caches(1, 1, block_size, layout.shape_of(layer), dtype, meta).layers()[0].block_bytes
            for layer in group.layers
        )
        for group in layout.groups
    ]


def fixed_num_blocks(config: RunnerConfig, demand: CacheDemand) -> tuple[str, int] | None:
    """Return the variable that sets the cache's size and the blocks that it means; None when the memory decides.

    Blocks that take no memory, of a model without a cache, are as many as the batch can use.

    Raises:
        ConfigError: They do not hold the longest sequence.
    """
    if config.num_blocks is not None:
        variable, num_blocks = "HEADRACE_NUM_BLOCKS", config.num_blocks
    elif demand.block_bytes == 0:
        variable, num_blocks = "HEADRACE_NUM_BLOCKS", demand.blocks_per_sequence * config.max_num_seqs
    elif config.kv_cache_bytes is not None:
        variable, num_blocks = "HEADRACE_KV_CACHE_BYTES", demand.num_blocks(config.kv_cache_bytes)
    else:
        return None
    if num_blocks < demand.blocks_per_sequence:
        length = demand.len_within(num_blocks)
        raise ConfigError(
            variable,
            f"the KV cache would hold {num_blocks * demand.block_size} tokens, but a sequence may have "
            f"{demand.max_model_len}. Allow {demand.least_bytes} bytes ({demand.blocks_per_sequence} blocks)"
            + ("" if length is None else f", or lower HEADRACE_MAX_MODEL_LEN to {length}"),
        )
    return variable, num_blocks


@dataclass(frozen=True, slots=True)
class StatePool:
    """The states of all layers, by slot.

    Attributes:
        layers: In order; None for those without a state.
        max_draft_tokens: Of a sequence, that are kept until it is known which of them stand.
    """

    layers: Sequence[LayerState | None]
    max_draft_tokens: int

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy states from slots to others, which may be sources too; no slot is twice in `targets`.

        Shapes:
            sources, targets: `[num_states]` int64
        """
        for layer in self.layers:
            for part in () if layer is None else layer.parts:
                part.index_copy_(0, targets, part.index_select(0, sources))


def allocate_states(
    layout: CacheLayout, num_slots: int, max_draft_tokens: int, device: torch.device
) -> StatePool | None:
    """Allocate the states of a model's recurrent layers, and of padding; None where it has none."""
    if not layout.state_layers:
        return None
    layers: list[LayerState | None] = []
    for layer in range(len(layout.layers)):
        memory = layout.state_of(layer)
        if memory is None:
            layers.append(None)
            continue
        # Zeros take no memory of a host before they are written.
        parts = [torch.zeros(num_slots + 1, *part.shape, dtype=part.dtype, device=device) for part in memory.parts]
        drafts = torch.zeros(num_slots + 1, max_draft_tokens, memory.num_inputs, device=device)
        layers.append(LayerState(tuple(parts), drafts if max_draft_tokens else None))
    return StatePool(layers, max_draft_tokens)


def state_pool_bytes(layout: CacheLayout, num_slots: int, max_draft_tokens: int) -> int:
    """Return the memory of what `allocate_states` allocates."""
    return (num_slots + 1) * slot_bytes(layout, max_draft_tokens)


def slot_bytes(layout: CacheLayout, max_draft_tokens: int) -> int:
    """Return the memory of one slot; 0 without recurrent layers."""
    draft_bytes = sum(state.num_inputs for state in layout.states) * max_draft_tokens * torch.float32.itemsize
    return layout.state_bytes + draft_bytes
