"""Evicts blocks of sequences that have a budget, before their content is overwritten by their next tokens.

A full table loses some blocks. The keys of those that follow turn back by as many positions, so that a token's position
is its place among the kept tokens. A block that turns moves forward in the table, so it turns less often than the table
has places. Blocks that no other sequence holds or can find turn in place, and evicted blocks are reused: a sequence
that has filled its budget takes no more blocks. What others hold, or could find, they keep as it is, and the sequence
gets a copy. What a sequence computes after its first eviction is never shared.

Owns the evictions that no plan has told yet, and blocks that steps up to the one that tells them may still read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.plan import Eviction
from gpu_worker.core.sequence import Sequence


@dataclass(slots=True)
class _Eviction:
    """One that no plan has told, or whose step has not landed; `replaced` blocks are held until then."""

    sequence: Sequence
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)


class Evictions:
    """Writes `Sequence.num_evicted_tokens` and tables. No plan has told `untold` ones; steps in flight tell `told`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.untold: dict[Sequence, _Eviction] = {}
        self.told: deque[tuple[int, _Eviction]] = deque()

    @staticmethod
    def is_due(sequence: Sequence) -> bool:
        """Return whether the table of a sequence is full, so that its next token has no room."""
        num_kept = sequence.num_computed_tokens - sequence.num_evicted_tokens
        return sequence.budget is not None and num_kept == sequence.budget.num_tokens

    def can_evict(self, sequence: Sequence) -> bool:
        """Return whether the pool has the copies that the sequence needs of blocks that others hold too."""
        gone = _places(sequence)
        moved = [block for place, block in enumerate(sequence.block_table) if place > gone[0] and place not in gone]
        return sum(self._pool.num_holders(block) > 1 for block in moved) <= self._pool.num_available

    def evict(self, sequence: Sequence, num_spare: int) -> None:
        """Evict blocks of a sequence that is due, and can evict.

        Args:
            sequence: Its table is full.
            num_spare: Free blocks that are promised to no sequence: as many cached blocks may be kept for others.
        """
        assert sequence.budget is not None
        gone, table = _places(sequence), sequence.block_table
        if sequence.scores is not None:
            sequence.scores.evict(_number(sequence), tuple(gone))
        planned = _Eviction(sequence)
        kept: list[int] = []
        reused: list[int] = []
        for block in [table[place] for place in gone]:
            if self._is_kept_for_others(block, num_spare - len(planned.replaced)):
                planned.replaced.append(block)
            else:
                reused.append(block)
        for place in range(gone[0], len(table)):
            if place in gone:
                continue
            target = source = table[place]
            if self._is_kept_for_others(source, num_spare - len(planned.replaced)):
                planned.replaced.append(source)
                (target,) = self._pool.allocate(1)
            planned.moves.append((source, target, bisect_left(gone, place) * sequence.budget.block_size))
            kept.append(target)
        sequence.block_table = [*table[: gone[0]], *kept, *reused]
        sequence.num_told_blocks = min(sequence.num_told_blocks, gone[0])
        sequence.num_evicted_tokens += len(gone) * sequence.budget.block_size
        assert sequence not in self.untold, "a sequence has room until its next tokens are planned"
        self.untold[sequence] = planned

    def take(self, step: int) -> list[Eviction]:
        """Return what plan number `step` has to tell."""
        told = list(self.untold.values())
        self.untold.clear()
        self.told += [(step, each) for each in told]
        return [Eviction(each.sequence.row, each.sequence.num_evicted_tokens, each.moves) for each in told]

    def land(self, step: int) -> None:
        """Let go of blocks that no step behind number `step`, which has landed, reads."""
        while self.told and self.told[0][0] <= step:
            self._pool.release(self.told.popleft()[1].replaced)

    def drop(self, sequence: Sequence) -> None:
        """Forget the evictions of a leaving sequence that no plan has carried."""
        if (planned := self.untold.pop(sequence, None)) is not None:
            self._pool.release(planned.replaced)

    def unlanded(self) -> list[Sequence]:
        """Return the sequences of which it is not known whether their keys have turned."""
        return list(dict.fromkeys([*(each.sequence for _, each in self.told), *self.untold]))

    def check_integrity(self, holders: Iterable[Sequence], block_size: int) -> list[int]:
        """Assert that tables hold what sequences keep; return blocks that are held besides, each as often as it is."""
        for sequence in holders:
            num_kept, num_blocks = sequence.num_computed_tokens - sequence.num_evicted_tokens, len(sequence.block_table)
            assert num_kept <= num_blocks * block_size
            assert sequence.budget is None or num_blocks <= sequence.budget.num_blocks
        planned = [*self.untold.values(), *(told for _, told in self.told)]
        return [block for each in planned for block in each.replaced]

    def _is_kept_for_others(self, block: int, num_spare: int) -> bool:
        """Return whether a block stays as it is; one that could only be found gives way where blocks are short."""
        if self._pool.num_holders(block) > 1 or (self._pool.is_findable(block) and num_spare > 0):
            return True
        self._pool.unlabel([block])
        return False


def _number(sequence: Sequence) -> int:
    assert sequence.budget is not None
    return sequence.num_evicted_tokens // (sequence.budget.num_evicted * sequence.budget.block_size)


def _places(sequence: Sequence) -> Values[int]:
    """Return which blocks of its table a sequence that is due evicts, by their places in order."""
    assert sequence.budget is not None
    return sequence.budget.evicted_places() if sequence.scores is None else sequence.scores.places(_number(sequence))
