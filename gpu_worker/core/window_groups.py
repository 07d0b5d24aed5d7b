"""Groups of layers that read only a sequence's last tokens, and their blocks.

Owns each group's pool and the count of promised blocks; writes `WindowTable`. A sequence takes a block when a step
needs it, and gives it back when a landed step has moved the window past it. So between steps a sequence holds the
window and one block at most. A block that was given back can be found until it is reused. It is reused before other
blocks, unless it lies in the window before an end of a shared prefix (`WindowTable.shared_ends`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.prefix_cache import Kept
from gpu_worker.core.scheduler_config import SchedulerConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.tiers import KvTiers


class WindowGroup:
    """One group; running sequences were promised `num_promised` of its blocks, and do not hold them yet."""

    def __init__(self, config: WindowConfig, block_size: int, retained_share: float = 0.0) -> None:
        self.pool = BlockPool(config.num_blocks, retained_share=retained_share)
        self.window = config.window
        self.most_blocks = config.most_blocks(block_size)
        self._block_size = block_size
        self.num_promised = 0

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block that the token behind `num_tokens` reads, or the one that it is written to."""
        return max(0, num_tokens - self.window + 1) // self._block_size

    def resumable(self, digests: Values[bytes], num_blocks: int, is_kept: Kept | None = None) -> int:
        """Return the most blocks, `num_blocks` at most, behind which a sequence of these digests can go on.

        What `is_kept` says is kept elsewhere counts too.
        """
        end = place = num_blocks
        while end > 0 and place > self.first_needed(end * self._block_size):
            place -= 1
            if self.pool.find(digests[place]) is None and not (is_kept and is_kept(digests[place])):
                end = place
        return end

    def open(self, digests: Values[bytes], num_hits: int, expected: int, shared_ends: tuple[int, ...]) -> WindowTable:
        """Give a sequence that goes on behind `num_hits` known blocks those in its window, and one for the next token.

        The pool must have as many as are expected.
        """
        first = min(num_hits, self.first_needed(num_hits * self._block_size))
        found = [self.pool.find(digest) for digest in digests[first:num_hits]]
        hits = [block for block in found if block is not None]
        assert len(hits) == num_hits - first, "the prefix was matched without asking this group"
        self.pool.share(hits)
        held = hits + self.pool.allocate(1)
        table = WindowTable([held[0]] * first + held, first, expected, num_hits, shared_ends)
        self.num_promised += _promised(table)
        return table

    def num_missing(self, table: WindowTable, num_tokens: int) -> int:
        """Return how many blocks the table lacks to cover `num_tokens` tokens."""
        count = -(-num_tokens // self._block_size) - len(table.blocks)
        return count if count > 0 else 0

    def grow(self, table: WindowTable, num_tokens: int) -> None:
        """Let the table cover `num_tokens` tokens; the pool has the blocks."""
        if (count := self.num_missing(table, num_tokens)) > 0:
            promised = _promised(table)
            table.blocks += self.pool.allocate(count)
            self.num_promised -= promised - _promised(table)

    def reach(self, table: WindowTable, num_tokens: int, *, takes_promised: bool = False) -> int:
        """Return how many tokens the table can cover, `num_tokens` at most.

        Blocks that others were promised are left alone unless they are taken for one step only.
        """
        room = self.pool.num_available
        if not takes_promised:
            room -= self.num_promised - _promised(table)
        return min(num_tokens, (len(table.blocks) + max(0, room)) * self._block_size)

    def trim(self, table: WindowTable, num_tokens: int) -> None:
        """Take back the blocks behind those that `num_tokens` tokens need."""
        needed = -(-num_tokens // self._block_size)
        if needed < len(table.blocks):
            promised = _promised(table)
            self.pool.release(table.blocks[needed:])
            del table.blocks[needed:]
            table.num_told = min(table.num_told, needed)
            self.num_promised += _promised(table) - promised

    def publish(self, table: WindowTable, digests: Values[bytes], num_full: int) -> None:
        """Make the first `num_full` blocks findable, as far as they were not considered yet."""
        if num_full <= table.num_findable:
            return
        for place in range(max(table.num_findable, table.num_released), num_full):
            self.pool.label(table.blocks[place], digests[place])
        table.num_findable = num_full

    def leave_behind(self, table: WindowTable, num_written: int) -> None:
        """Give back the blocks that no token behind the first `num_written` reads."""
        first = self.first_needed(num_written)
        if first <= table.num_released:
            return
        promised = _promised(table)
        for place in range(table.num_released, first):
            self.pool.release([table.blocks[place]], is_spent=not self.is_near_end(table, place))
        table.num_released = first
        self.num_promised += _promised(table) - promised

    def is_near_end(self, table: WindowTable, place: int) -> bool:
        """Return whether a block lies in the window before a shared end."""
        # The first comparison is for speed: all ends are in the prompt, and most places are behind it.
        return place < table.last_shared_end and any(end - self.most_blocks <= place < end for end in table.shared_ends)

    def hide(self, table: WindowTable, digests: Values[bytes]) -> None:
        """Take the sequence's blocks, and those that it has left behind, out of the prefix cache."""
        self.pool.unlabel(table.blocks[table.num_released :])
        for digest in digests[: table.num_released]:
            self.pool.forget(digest)

    def close(self, table: WindowTable) -> None:
        """Take all blocks back; what they hold stays findable until they are reused."""
        self.num_promised -= _promised(table)
        self.pool.release(table.blocks[table.num_released :])

    def check_integrity(self, holders: Values[tuple[WindowTable, int]], others: Iterable[int] = ()) -> None:
        """Assert that these tables hold all blocks that are held, and what their next tokens, by number, read.

        Some blocks may be held by `others`, each as often as it is listed.
        """
        self.pool.check_holders([table.blocks[table.num_released :] for table, _ in holders], others)
        for table, num_tokens in holders:
            assert num_tokens <= len(table.blocks) * self._block_size
            assert table.num_released <= self.first_needed(num_tokens), "a block in the window was given back"
        assert sum(_promised(table) for table, _ in holders) == self.num_promised


def _promised(table: WindowTable) -> int:
    promised = table.num_expected - table.num_held
    return promised if promised > 0 else 0


class WindowGroups:
    """Writes `Sequence.window_tables`. False where a model has no such layers."""

    def __init__(self, config: SchedulerConfig, tiers: KvTiers | None = None) -> None:
        self._block_size = config.block_size
        self._tiers = tiers
        self._groups = tuple(WindowGroup(group, config.block_size, config.retained_share) for group in config.windows)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[WindowGroup]:
        return iter(self._groups)

    @property
    def usage(self) -> list[tuple[str, int, int]]:
        """Name each group, with its blocks in use, and how many there are."""
        pools = [(group.window, group.pool) for group in self._groups]
        return [(f"window-{window}", pool.num_blocks - pool.num_available, pool.num_blocks) for window, pool in pools]

    @property
    def offsets(self) -> set[int]:
        """The numbers of tokens, modulo the block size, behind which a block leaves a window."""
        return {(group.window - 1) % self._block_size for group in self._groups}

    def free_share(self, num_blocks: int) -> int:
        """Return the share of `num_blocks` that is free in the group that has least."""
        pools = [group.pool for group in self._groups]
        return min((num_blocks * pool.num_available // pool.num_blocks for pool in pools), default=num_blocks)

    def shortages(self, expected: int) -> list[int]:
        """Return for each group how many more blocks must be free to admit a sequence of `expected` blocks."""
        return [
            min(expected, group.most_blocks) - (group.pool.num_available - group.num_promised) for group in self._groups
        ]

    def num_freed_by(self, sequences: Values[Sequence]) -> list[int]:
        """Return for each group how many blocks, held or promised, get free when these running sequences end."""
        return [
            sum(map(_promised, tables)) + group.pool.num_freed_by([t.blocks[t.num_released :] for t in tables])
            for group, tables in ((g, [s.window_tables[n] for s in sequences]) for n, g in enumerate(self._groups))
        ]

    def open(self, sequence: Sequence, num_hits: int, num_known: int) -> None:
        """Give a sequence that goes on behind `num_hits` known blocks its tables.

        Of its prefix somebody has computed `num_known` blocks before.
        """
        if not self._groups:
            return
        shared_ends = (num_hits, num_known, sequence.num_prompt_tokens // self._block_size)
        digests, expected = sequence.block_digests, sequence.expected_blocks
        sequence.window_tables = tuple(
            group.open(digests, num_hits, min(expected, group.most_blocks), shared_ends) for group in self._groups
        )

    def can_grow(self, sequences: Values[Sequence]) -> bool:
        """Return whether the pools have what these sequences lack for their next tokens."""
        for number, group in enumerate(self._groups):
            missing = [group.num_missing(s.window_tables[number], s.num_computed_tokens + 1) for s in sequences]
            if sum(missing) > group.pool.num_available:
                return False
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the tables cover `num_tokens` tokens; the pools have the blocks."""
        for group, table in self._of(sequence):
            group.grow(table, num_tokens)

    def reach(self, sequence: Sequence, num_tokens: int, *, takes_promised: bool = False) -> int:
        """Return how many tokens all tables can cover, `num_tokens` at most.

        Blocks that others were promised are left alone unless they are taken for one step only.
        """
        for group, table in self._of(sequence):
            num_tokens = group.reach(table, num_tokens, takes_promised=takes_promised)
        return num_tokens

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks behind those that the sequence's tokens need."""
        for group, table in self._of(sequence):
            group.trim(table, max(sequence.num_tokens, sequence.num_computed_tokens + 1))

    def publish(self, sequence: Sequence, num_written: int, *, is_findable: bool) -> None:
        """Publish the blocks that the first `num_written` tokens fill; give back those that no later token reads.

        If they are findable, the digests of the sequence's blocks are known up to there.
        """
        for number, (group, table) in enumerate(self._of(sequence), start=1):
            if is_findable:
                first = max(table.num_findable, table.num_released)
                group.publish(table, sequence.block_digests, num_written // self._block_size)
                if self._tiers is not None:
                    near = [place for place in range(first, table.num_findable) if group.is_near_end(table, place)]
                    self._store(sequence, number, table, near)
            group.leave_behind(table, num_written)

    def hide(self, sequence: Sequence) -> None:
        """Take the sequence's blocks out of the prefix cache."""
        for group, table in self._of(sequence):
            group.hide(table, sequence.block_digests)

    def close(self, sequence: Sequence) -> None:
        """Take all blocks back. A sequence that could not begin again has none any more.

        Another may go on behind it: its last window is stored.
        """
        for number, (group, table) in enumerate(zip(self._groups, sequence.window_tables, strict=False), start=1):
            if self._tiers is not None:
                self._store(sequence, number, table, range(table.num_released, table.num_findable))
            group.close(table)
        sequence.window_tables = ()

    def check_integrity(self, holders: Values[Sequence], others: Values[Values[int]] = ()) -> None:
        """Assert that these sequences, and `others` by group, hold each block as often as it is counted."""
        for number, group in enumerate(self._groups):
            tables = [(s.window_tables[number], s.num_computed_tokens) for s in holders]
            group.check_integrity(tables, others[number] if others else ())

    def num_promised(self, number: int) -> int:
        """Return how many blocks of group `number`, counted from 0, were promised to running sequences."""
        return self._groups[number].num_promised

    def _store(self, sequence: Sequence, number: int, table: WindowTable, places: Iterable[int]) -> None:
        assert self._tiers is not None
        pool, digests = self._groups[number - 1].pool, sequence.block_digests
        for place in places:
            if pool.find(digests[place]) is not None:
                self._tiers.store(number, table.blocks[place], digests[place], sequence.salt)

    def _of(self, sequence: Sequence) -> Iterable[tuple[WindowGroup, WindowTable]]:
        return zip(self._groups, sequence.window_tables, strict=True)
