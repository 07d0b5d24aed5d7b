"""What a sequence holds in the cache groups other than the one that keeps all its tokens. Values only.

The number of a block is its place in the sequence, counted from 0. "The end of block `n`" means behind its first `n`
blocks, where `n * block_size` tokens have been computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class WindowTable:
    """The blocks of a sequence in a group that keeps its last tokens.

    Attributes:
        blocks: Ids of blocks, in the order of the sequence, as in `Sequence.block_table`. The first `num_released` ids
            are stale: those blocks were given back. A stale id is still one that may be read, but never used.
        num_expected: Blocks that admission reserved; those that are not held yet are promised to the sequence.
        num_findable: Blocks from the first that were offered to the prefix cache.
        shared_ends: Lengths, in blocks, of prefixes that other sequences are likely to share. The window before such
            an end is evicted later than other blocks, because a prefix hit there needs all of it.
        last_shared_end: The largest of these.
    """

    blocks: list[int]
    num_released: int
    num_expected: int
    num_findable: int
    shared_ends: tuple[int, ...] = ()
    num_told: int = 0
    last_shared_end: int = field(init=False)

    def __post_init__(self) -> None:
        self.last_shared_end = max(self.shared_ends, default=0)

    @property
    def num_held(self) -> int:
        """Blocks that were not given back."""
        return len(self.blocks) - self.num_released


@dataclass(slots=True, eq=False)
class StateSlot:
    """Where the recurrent state of a running sequence is. A checkpoint is named by the length of its prefix in blocks.

    Attributes:
        source: Slot of the checkpoint that the sequence starts from; None starts from the zero state.
        known_end: Length, in blocks, of the longest prefix that another sequence has computed; 0 when this sequence
            starts there. Prefixes part there, so a checkpoint is made there.
        reserved: Slots of the checkpoints that steps in flight will write, by checkpoint.
        checkpoints: The checkpoints that the sequence has made or started from, in order; evicted ones may be missing.
        output_checkpoint: The last checkpoint behind the prompt, which the next one replaces.
    """

    slot: int
    source: int | None
    known_end: int
    is_loaded: bool = False
    reserved: dict[int, int] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    output_checkpoint: int | None = None
