from __future__ import annotations

import dataclasses

import pytest
import torch

from gpu_worker.core.scheduler_config import SchedulerConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.execution.memory.group_shares import GroupShares
from gpu_worker.execution.memory.kv_cache import allocate_groups, group_block_bytes
from gpu_worker.layers.cache_layout import CacheLayout, KeepsTokens
from kernels.layer_cache import CacheShape
from shared.sampling import Sampling

BLOCK = 16
META = torch.device("meta")
SHAPE = CacheShape(2, 64, 64)
WINDOW = 1024


def layout_of(*windows: int | None) -> CacheLayout:
    return CacheLayout(tuple(KeepsTokens(SHAPE, window) for window in windows))


HYBRID = layout_of(*([WINDOW] * 5 + [None]) * 2)


def shares_of(layout: CacheLayout, max_model_len: int = 1 << 17, dtype: torch.dtype = torch.float16) -> GroupShares:
    return GroupShares(layout, BLOCK, max_model_len, max_num_batched_tokens=2048, dtype=dtype)


def total_bytes(layout: CacheLayout, num_blocks: list[int]) -> int:
    cache = allocate_groups(layout, num_blocks, BLOCK, torch.bfloat16, META)
    return sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors)


def num_admitted(layout: CacheLayout, num_bytes: int, num_tokens: int) -> int:
    """Admit sequences with prompts of a length, as long as pools of a size hold them."""
    shares = shares_of(layout, dtype=torch.bfloat16)
    blocks = shares.num_blocks(shares.demand.num_blocks(num_bytes))
    assert total_bytes(layout, blocks) <= num_bytes
    groups = zip(layout.groups, blocks, strict=True)
    windows = tuple(WindowConfig(group.window, count) for group, count in groups if group.window is not None)
    pools = SequenceBlocks(SchedulerConfig(BLOCK, blocks[0], 1000, 2048, 1 << 17, windows=windows))
    holders: list[Sequence] = []
    while True:
        sequence = Sequence(str(len(holders)), [len(holders)] * num_tokens, num_tokens, Sampling(), 128)
        sequence.max_num_tokens = num_tokens + 128
        if not pools.fits(sequence):
            pools.check_integrity(holders)
            return len(holders)
        pools.admit(sequence)
        holders.append(sequence)


def test_hybrid_admits_three_times_the_sequences_of_the_flat_layout() -> None:
    num_bytes, num_tokens = 8 << 30, 32 << 10
    flat, hybrid = (num_admitted(layout, num_bytes, num_tokens) for layout in (HYBRID.flat(), HYBRID))
    assert (flat, hybrid) == (42, 155)
    assert hybrid >= 3 * flat


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(HYBRID.flat(), id="flat"),
        pytest.param(layout_of(64, 64), id="windows-only"),
        pytest.param(layout_of(None, 64, 512), id="two-windows"),
    ],
)
@pytest.mark.parametrize("num_bytes", [50 << 20, 1 << 30])
def test_memory_is_used_and_not_exceeded(layout: CacheLayout, num_bytes: int) -> None:
    shares = shares_of(layout, max_model_len=4096)
    demand = shares.demand
    blocks = shares.num_blocks(demand.num_blocks(num_bytes))
    used = total_bytes(layout, blocks)
    assert 0.98 * num_bytes < used <= demand.num_bytes(blocks[0]) <= num_bytes
    assert demand.num_bytes(0) == sum(
        size * count
        for size, count in zip(group_block_bytes(layout, BLOCK, torch.float16), shares.num_blocks(0), strict=True)
    )


def test_every_group_of_windows_holds_a_window_and_the_largest_step() -> None:
    _, near, far = shares_of(layout_of(None, 64, 512)).num_blocks(0)
    assert (near, far) == (128 + 5, 128 + 33)


def test_blocks_that_take_no_memory_are_enough_for_sequences_of_any_length() -> None:
    shares = shares_of(layout_of(64, 64), max_model_len=4096)
    whole, windows = shares.num_blocks(shares.demand.num_blocks(1 << 28))
    fixed = shares.num_blocks(0)[1]
    assert (windows - fixed) // 5 == whole // 256


def test_window_that_holds_the_longest_sequence_keeps_all_tokens() -> None:
    assert layout_of(64, 512).within(512) == layout_of(64, None)
    assert layout_of(64, 512).within(513) == layout_of(64, 512)


def test_checkpoints_get_their_ratio_of_the_same_bytes() -> None:
    layout, slot_bytes, num_bytes = layout_of(None, None), 3_000_017, 1 << 30
    shares = dataclasses.replace(shares_of(layout), slot_bytes=slot_bytes, checkpoint_ratio=0.5)
    num_blocks = shares.demand.num_blocks(num_bytes)
    of_states = shares.num_checkpoints(num_blocks) * slot_bytes
    of_blocks = total_bytes(layout, [num_blocks])
    assert of_states + of_blocks <= num_bytes
    assert of_states + of_blocks > num_bytes - 2 * slot_bytes
    assert of_states == pytest.approx(0.5 * of_blocks, rel=0.02)


def test_no_block_has_more_than_one_checkpoint() -> None:
    shares = dataclasses.replace(shares_of(layout_of(None)), slot_bytes=1000, checkpoint_ratio=0.9)
    (block_bytes,) = group_block_bytes(shares.layout, BLOCK, torch.float16)
    assert shares.num_checkpoints(77) == 77
    assert shares.demand.block_bytes == block_bytes + 1000


def test_model_without_states_gives_nothing_to_checkpoints() -> None:
    plain = shares_of(HYBRID)
    assert dataclasses.replace(plain, checkpoint_ratio=0.9).demand == plain.demand
    assert plain.num_checkpoints(1000) == 0
