"""Gives sequences their blocks: at admission, as they grow, and back when they stop.

Owns the pool, the prefix cache and the count of promised blocks. Admission counts the blocks of all known tokens,
which are taken at once, so that an admitted prompt is never stuck half-way, plus a bounded headroom for output, which
is only promised: later admissions leave it alone, and the sequence takes it block by block as it grows.
"""

from __future__ import annotations

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.prefix_cache import PrefixCache
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence


class SequenceBlocks:
    """Writes `block_table`, `expected_blocks` and the prefix counters of sequences."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Manage the pool that `config` describes."""
        self.pool = BlockPool(config.num_blocks)
        self._config = config
        self._block_size = config.block_size
        self._cache = PrefixCache(self.pool, config.block_size) if config.enable_prefix_caching else None
        self._num_promised = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    def admission_shortage(self, sequence: Sequence) -> int:
        """Return how many more blocks would have to be free to admit a waiting sequence; none when not positive.

        With nothing running, a sequence that fits the pool needs no asking: there is no promise to keep to anybody.
        """
        num_shared = sum(map(self.pool.is_in_use, self._match(sequence)))
        return self._expected_blocks(sequence) - num_shared - (self.pool.num_available - self._num_promised)

    @staticmethod
    def num_counted(sequence: Sequence) -> int:
        """Return how many blocks a running sequence holds or was promised."""
        return max(sequence.expected_blocks, len(sequence.block_table))

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence its prefix hits and new blocks for the rest of its tokens."""
        hits = self._match(sequence)
        self.pool.share(hits)
        missing = self._config.num_blocks_for(sequence.num_tokens) - len(hits)
        sequence.block_table = hits + self.pool.allocate(missing)
        sequence.num_findable_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self._block_size
        # What steps contributed before a preemption is computed again.
        sequence.pooled.clear()
        sequence.expected_blocks = self._expected_blocks(sequence)
        self._num_promised += self._promised(sequence)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.num_prefix_queries += sequence.num_prompt_tokens
            self.num_prefix_hits += sequence.num_cached_tokens

    def num_missing(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence lacks for the tokens that it has or is getting."""
        return self._config.num_blocks_for(sequence.num_tokens) - len(sequence.block_table)

    def grow(self, sequence: Sequence) -> None:
        """Give the sequence the blocks that it lacks; the pool has them."""
        promised = self._promised(sequence)
        sequence.block_table += self.pool.allocate(self.num_missing(sequence))
        self._num_promised -= promised - self._promised(sequence)

    def cover(self, sequence: Sequence, num_tokens: int) -> int:
        """Let the block table cover so many tokens, as far as blocks are free; return how many it covers, at most that.

        For one step: `trim` takes back what the sequence did not grow into.
        """
        missing = self._config.num_blocks_for(num_tokens) - len(sequence.block_table)
        count = min(missing, self.pool.num_available)
        if count > 0:
            promised = self._promised(sequence)
            sequence.block_table += self.pool.allocate(count)
            self._num_promised -= promised - self._promised(sequence)
        return min(num_tokens, len(sequence.block_table) * self._block_size)

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks behind those that the sequence's tokens need."""
        needed = self._config.num_blocks_for(sequence.num_tokens)
        if needed < len(sequence.block_table):
            promised = self._promised(sequence)
            self.pool.release(sequence.block_table[needed:])
            # A new list, because runners take a table that is the same list to have only grown.
            sequence.block_table = sequence.block_table[:needed]
            self._num_promised += self._promised(sequence) - promised

    def publish(self, sequence: Sequence, num_written: int) -> None:
        """Make the blocks findable that the sequence's first `num_written` tokens fill; these are in them for good."""
        if self._cache:
            self._cache.publish(sequence, num_written)

    def hide(self, sequence: Sequence) -> None:
        """Let nobody find what the sequence's blocks hold: it may be wrong. Those who share them keep them."""
        self.pool.unlabel(sequence.block_table)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back. What they hold stays findable until they are reused."""
        self._num_promised -= self._promised(sequence)
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.expected_blocks = 0
        sequence.num_findable_blocks = 0
        sequence.num_computed_tokens = 0

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Assert that exactly these sequences hold blocks, each block as often as it is counted."""
        self.pool.check_integrity()
        assert self._num_promised == sum(map(self._promised, holders))
        counts: dict[int, int] = {}
        for sequence in holders:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert sequence.num_computed_tokens <= len(sequence.block_table) * self._block_size
            for block in sequence.block_table:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self.pool.ref_counts(), "a block is held by nobody or counted wrongly"

    def _match(self, sequence: Sequence) -> list[int]:
        return self._cache.match(sequence) if self._cache else []

    def _expected_blocks(self, sequence: Sequence) -> int:
        return self._config.expected_blocks(sequence.num_tokens, sequence.max_num_tokens)

    def _promised(self, sequence: Sequence) -> int:
        return self.num_counted(sequence) - len(sequence.block_table)
