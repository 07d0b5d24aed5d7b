"""What a sequence holds of the cache groups besides the one that keeps all its tokens. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class WindowTable:
    """The blocks of a sequence in a group that keeps its last tokens.

    Attributes:
        blocks: By their place in the sequence, as in `Sequence.block_table`. Those before `num_released` were given
            back; the ids that stand there are of blocks that were written to, and what is in them means nothing.
        num_released: How many of the first are not held any more.
        expected: Blocks that admission counted; those that are not held are promised.
        num_findable: Blocks from the first that were considered for the prefix cache.
        anchors: Numbers of blocks of prefixes that others are likely to share: the blocks that a window needs behind
            one of them are found for longer.
        last_anchor: The largest of these.
    """

    blocks: list[int]
    num_released: int
    expected: int
    num_findable: int
    anchors: tuple[int, ...] = ()
    last_anchor: int = field(init=False)

    def __post_init__(self) -> None:
        self.last_anchor = max(self.anchors, default=0)

    @property
    def num_held(self) -> int:
        """Blocks that are held."""
        return len(self.blocks) - self.num_released


@dataclass(slots=True, eq=False)
class StateSlot:
    """Where the state of a running sequence is.

    Attributes:
        slot: Its own, which each step changes.
        source: Slot of the checkpoint that it starts from; None starts from nothing.
        is_loaded: A step was planned that starts from `source` or from nothing.
        origin: Blocks of the checkpoint that it starts from.
        branch: Blocks of the longest prefix that somebody has computed before; 0 when it starts there.
        reserved: Checkpoints that steps in flight write, by number of blocks: their slots.
        chain: Numbers of blocks of the checkpoints that it has made or started from, in order; those that were evicted
            may be missing.
        tail: Number of blocks of the last checkpoint behind its prompt, which the next one replaces.
    """

    slot: int
    source: int | None
    origin: int
    branch: int
    is_loaded: bool = False
    reserved: dict[int, int] = field(default_factory=dict)
    chain: list[int] = field(default_factory=list)
    tail: int | None = None
