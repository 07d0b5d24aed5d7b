"""Parts of the blocks that keep all tokens: a sequence holds blocks of one part, and finds its prefix there.

What a part stands for is the runner's business: parts may be memory of different devices. Blocks are numbered within
their part. All parts have as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.prefix_cache import PrefixCache
from gpu_worker.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class BlockPart:
    """One part.

    Attributes:
        cache: Finds prefixes in it; None without a prefix cache.
        num_promised: Blocks that its running sequences were promised, and do not hold yet.
    """

    number: int
    pool: BlockPool
    cache: PrefixCache | None
    num_promised: int = 0

    @property
    def num_spare(self) -> int:
        """Free blocks that no sequence was promised."""
        return self.pool.num_available - self.num_promised


class BlockParts:
    """All parts, in order."""

    def __init__(self, parts: Iterable[BlockPart]) -> None:
        self._parts = tuple(parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[BlockPart]:
        return iter(self._parts)

    def of(self, sequence: Sequence) -> BlockPart:
        """Return the part that a running sequence belongs to."""
        return self._parts[sequence.part]

    def divided(self, sequences: Values[Sequence]) -> Iterable[tuple[BlockPart, Values[Sequence]]]:
        """Return each part with those of some running sequences that belong to it."""
        if len(self._parts) == 1:
            return ((self._parts[0], sequences),)
        return [(part, [each for each in sequences if each.part == part.number]) for part in self._parts]

    def crowded(self, short: Values[Sequence]) -> BlockPart | None:
        """Return a part with too few free blocks for sequences that lack some, listed once for each; None if none."""
        return next((part for part, own in self.divided(short) if len(own) > part.pool.num_available), None)

    def extend(self, sequences: Values[Sequence]) -> None:
        """Give each running sequence of the list a block; one that needs several is in the list as often.

        A block counts against what the sequence was promised, as long as that lasts.
        """
        for part, own in self.divided(sequences):
            for sequence, block in zip(own, part.pool.allocate(len(own)), strict=True):
                if sequence.expected_blocks > len(sequence.block_table):
                    part.num_promised -= 1
                sequence.block_table.append(block)

    def publish(self, written: Values[tuple[Sequence, int]]) -> None:
        """Let others find full blocks of sequences, as `PrefixCache.publish` says; there is a prefix cache."""
        for part in self._parts:
            assert part.cache is not None
            own = written if len(self._parts) == 1 else [pair for pair in written if pair[0].part == part.number]
            part.cache.publish(own)

    @property
    def num_available(self) -> int:
        """Free blocks."""
        return sum(part.pool.num_available for part in self._parts)

    @property
    def num_blank(self) -> int:
        """Blocks that hold nothing which could be found."""
        return sum(part.pool.num_blank for part in self._parts)

    @property
    def num_retained(self) -> int:
        """Blocks that are evicted last because a client asked for it."""
        return sum(len(part.pool.order.retention) for part in self._parts)

    def have(self, digest: bytes) -> bool:
        """Return whether a block with content of this digest can be found."""
        return any(part.pool.find(digest) is not None for part in self._parts)


def lacking(sequences: Iterable[Sequence], block_size: int) -> list[Sequence]:
    """Return the running sequences that lack blocks for their tokens, each as often as it lacks one."""
    short: list[Sequence] = []
    for sequence in sequences:
        # The last of these tokens is the next to be computed, unless more are known.
        last, last_known = sequence.num_computed_tokens, len(sequence.token_ids) - 1
        place = (last if last > last_known else last_known) - sequence.num_evicted_tokens
        count = place // block_size + 1 - len(sequence.block_table)
        if sequence.budget is not None:
            count = min(count, sequence.budget.num_blocks - len(sequence.block_table))
        if count > 0:
            short += [sequence] * count
    return short
