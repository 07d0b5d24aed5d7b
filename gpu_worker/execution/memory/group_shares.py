"""How the memory for keys and values is divided among groups of layers.

Every group has as many blocks as a number of sequences of one length need, so that none is empty while others are full.
That length is eight times the largest window, but no more than a sequence can have: longer sequences are bounded by the
blocks that keep all tokens, shorter ones by those that keep windows. Where no layer keeps all tokens, blocks for all
tokens take no memory, and the length is that of the longest sequence. Groups of windows have, besides, the blocks of
one window and of the largest step, whose tokens are written before they are read.

Checkpoints of recurrent states are divided alike: a share of one belongs to each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from gpu_worker.core.scheduler_config import WindowConfig
from gpu_worker.execution.memory.budget import CacheDemand
from gpu_worker.execution.memory.kv_cache import group_block_bytes
from gpu_worker.execution.memory.state_sizes import checkpoints_a_block
from gpu_worker.layers.cache_layout import CacheLayout

_WINDOWS_OF_A_SEQUENCE = 8


@dataclass(frozen=True, slots=True)
class GroupShares:
    """Blocks of the groups of one layout, by the number of those that keep all tokens.

    Attributes:
        slot_bytes: Of a state of the recurrent layers.
        checkpoint_ratio: Bytes of checkpoints of states for each byte of blocks.
        context_size: Ranks that each have as many tokens of a block.
    """

    layout: CacheLayout
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: torch.dtype
    slot_bytes: int = 0
    checkpoint_ratio: float = 0.0
    context_size: int = 1

    def num_blocks(self, num_whole: int) -> list[int]:
        """Return the blocks of each group beside `num_whole` blocks that keep all tokens."""
        return [num_whole, *(self._fixed(window) + int(num_whole * self._share(window)) for window in self._windows)]

    def num_checkpoints(self, num_whole: int) -> int:
        """Return the checkpoints of states beside `num_whole` blocks that keep all tokens."""
        return int(num_whole * self._checkpoints_a_block)

    @property
    def demand(self) -> CacheDemand:
        """What a block that keeps all tokens takes with its share of all others, checkpoints of states included."""
        _, *others = self._block_bytes
        fixed = sum(size * self._fixed(window) for size, window in zip(others, self._windows, strict=True))
        size = self._tokens_bytes + -((-self._checkpoints_a_block * self.slot_bytes) // 1)
        return CacheDemand(int(size), self.block_size, self.max_model_len, fixed)

    @property
    def _block_bytes(self) -> list[int]:
        return group_block_bytes(self.layout, self.block_size // self.context_size, self.dtype)

    @property
    def _tokens_bytes(self) -> int:
        """Bytes of a block that keeps all tokens, with its share of blocks of windows."""
        whole, *others = self._block_bytes
        shares = sum(
            (size * self._share(window) for size, window in zip(others, self._windows, strict=True)), Fraction()
        )
        return whole + -(-shares.numerator // shares.denominator)

    @property
    def _checkpoints_a_block(self) -> Fraction:
        return checkpoints_a_block(self.checkpoint_ratio, self._tokens_bytes, self.slot_bytes)

    @property
    def _windows(self) -> list[int]:
        return [group.window for group in self.layout.groups if group.window is not None]

    def _share(self, window: int) -> Fraction:
        """Return how many blocks of a window belong to one that keeps all tokens."""
        length = self.max_model_len
        if self.layout.groups[0].layers:
            length = min(length, _WINDOWS_OF_A_SEQUENCE * max(self._windows))
        most = WindowConfig(window, 0).most_blocks(self.block_size)
        return min(Fraction(1), Fraction(most, self._blocks(length)))

    def _fixed(self, window: int) -> int:
        chunk = min(self._blocks(self.max_num_batched_tokens), self._blocks(self.max_model_len))
        return chunk + WindowConfig(window, 0).most_blocks(self.block_size)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
