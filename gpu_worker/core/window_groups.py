"""The groups of layers that read only a sequence's last tokens, taken together.

A sequence has a table in each group (`Sequence.window_tables`); what is asked here is asked of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values

from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.window_blocks import WindowBlocks


class WindowGroups:
    """Writes `Sequence.window_tables`. False where a model has no such layers."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Manage the pools that `config` describes."""
        self._block_size = config.block_size
        self._groups = tuple(WindowBlocks(group, config.block_size) for group in config.windows)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[WindowBlocks]:
        return iter(self._groups)

    @property
    def usage(self) -> list[tuple[str, int, int]]:
        """Name each group, with its blocks that nobody else can have now, and all."""
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
        return [group.shortage(min(expected, group.most_blocks)) for group in self._groups]

    def num_counted(self, sequences: Values[Sequence]) -> list[int]:
        """Return for each group how many blocks these running sequences hold or were promised."""
        return [
            sum(max(table.num_expected, table.num_held) for table in tables)
            for tables in ([s.window_tables[number] for s in sequences] for number in range(len(self._groups)))
        ]

    def open(self, sequence: Sequence, num_hits: int, num_known: int) -> None:
        """Give a sequence its tables.

        Args:
            sequence: What is expected of it is known.
            num_hits: Known blocks behind which it goes on.
            num_known: Blocks of its prefix that somebody has computed before.
        """
        if not self._groups:
            return
        shared_ends = (num_hits, num_known, sequence.num_prompt_tokens // self._block_size)
        digests, expected = sequence.block_digests, sequence.expected_blocks
        sequence.window_tables = tuple(
            group.open(digests, num_hits, min(expected, group.most_blocks), shared_ends) for group in self._groups
        )

    def can_grow(self, sequences: Values[Sequence]) -> bool:
        """Say whether the pools have what these sequences lack for their next tokens."""
        for number, group in enumerate(self._groups):
            missing = [group.num_missing(s.window_tables[number], s.num_computed_tokens + 1) for s in sequences]
            if sum(missing) > group.pool.num_available:
                return False
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the tables cover so many tokens; the pools have the blocks."""
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

        Args:
            sequence: The digests of its blocks are known up to there if others may find them.
            num_written: Tokens.
            is_findable: Others may find the blocks that they fill.
        """
        for group, table in self._of(sequence):
            if is_findable:
                group.publish(table, sequence.block_digests, num_written // self._block_size)
            group.leave_behind(table, num_written)

    def hide(self, sequence: Sequence) -> None:
        """Let nobody find what the sequence's blocks hold."""
        for group, table in self._of(sequence):
            group.hide(table, sequence.block_digests)

    def close(self, sequence: Sequence) -> None:
        """Take all blocks back. A sequence that could not begin again has none any more."""
        for group, table in zip(self._groups, sequence.window_tables, strict=False):
            group.close(table)
        sequence.window_tables = ()

    def check_integrity(self, holders: Values[Sequence]) -> None:
        """Assert that exactly these sequences hold blocks, each block as often as it is counted."""
        for number, group in enumerate(self._groups):
            group.check_integrity((s.window_tables[number], s.num_computed_tokens) for s in holders)

    def _of(self, sequence: Sequence) -> Iterable[tuple[WindowBlocks, WindowTable]]:
        return zip(self._groups, sequence.window_tables, strict=True)
