"""Gives sequences their blocks: at admission, as they grow, and back when they stop.

Admission takes the blocks of all known tokens at once, so that an admitted prompt is never stuck half-way, and promises
a bounded headroom for output, which later admissions leave alone. Blocks of layers that keep the last tokens are
counted alike, and taken as steps need them. Of several parts that have room a sequence gets the one with most spare
blocks, those of its known prefix counted twice; it keeps it until it stops.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values

from msgspec import structs

from gpu_worker.core.block_hints import BlockHints
from gpu_worker.core.block_parts import BlockPart, BlockParts, lacking
from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.evictions import Evictions
from gpu_worker.core.prefix_cache import HitRule, PrefixCache
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.state_slots import StateSlots
from gpu_worker.core.step import ScheduledSequence, ScheduledStep, StepResult
from gpu_worker.core.tiers import FULL, KvTiers
from gpu_worker.core.window_groups import WindowGroups


class SequenceBlocks:
    """Writes the tables, `expected_blocks` and the prefix counters of sequences.

    Attributes:
        parts: Of the blocks that keep all tokens; `pool` is the first one's.
        rules: What the further groups say of a prefix, by number of the group from 1 on.
        num_budgeted: Running sequences that have a budget, of which `evictions` evicts blocks.
    """

    def __init__(self, config: SchedulerConfig, tiers: KvTiers | None = None) -> None:
        size, share = config.num_blocks // config.num_parts, config.retained_share
        pools = [BlockPool(size, self._count_evicted, share) for _ in range(config.num_parts)]
        self.pool = pools[0]
        self.num_evicted = self.num_budgeted = 0
        self._tiers, self.evictions = tiers, Evictions(self.pool)
        self.windows = WindowGroups(config, tiers)
        self.states = None
        if config.state is not None:
            self.states = StateSlots(
                config.state, config.block_size, tiers, 1 + len(self.windows), config.retained_share
            )
        self._config, self.block_size = config, config.block_size
        self.rules: list[HitRule] = [*self.windows] if self.states is None else [*self.windows, self.states]
        self._cache: PrefixCache | None = None
        caches: Values[PrefixCache | None] = [None] * len(pools)
        self._hints: BlockHints | None = None
        if config.enable_prefix_caching:
            self._hints = BlockHints([*pools, *(group.pool for group in self.windows)], self.states, tiers)
            sessions = self._hints.sessions
            caches = [PrefixCache(pool, config.block_size, self.rules, tiers, sessions) for pool in pools]
            self._cache = caches[0]
        self.parts = BlockParts(map(BlockPart, range(len(pools)), pools, caches))
        self._has_windows = len(self.windows) > 0
        self._to_publish = self._distances()
        self.num_prefix_queries = self.num_prefix_hits = self.num_device_hits = 0

    @property
    def num_free(self) -> int:
        """Blocks that keep all tokens and can be handed out, or their share where a group of windows has fewer."""
        return min(self.parts.num_available, self.windows.free_share(self._config.num_blocks))

    @property
    def usage(self) -> tuple[tuple[str, int, int], ...]:
        """Name each kind of memory, with its blocks or slots in use, and how many there are."""
        num_blocks = self._config.num_blocks
        full = ("full", num_blocks - self.parts.num_available, num_blocks)
        states = [] if self.states is None else [("state", self.states.num_used, self.states.num_slots)]
        return (full, *self.windows.usage, *states)

    def _shortages(self, sequence: Sequence, part: BlockPart) -> list[int]:
        """Return for each group how many more blocks would have to be free to admit a waiting sequence to a part.

        None are missing where it is not positive. With nothing running, a sequence that fits the pools needs no asking:
        there is no promise to keep to anybody.
        """
        hits, _ = self._match(sequence, part)
        expected = self.expected_blocks(sequence)
        num_shared = sum(map(part.pool.is_in_use, hits))
        shortages = [expected - num_shared - part.num_spare]
        shortages += self.windows.shortages(expected)
        if self.states is not None:
            shortages.append(1 - self.states.num_available)
        return shortages

    def fits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence can be admitted beside those that run."""
        return any(self._fits(sequence, part) for part in self.parts)

    def helpful(self, sequence: Sequence, victims: Values[Sequence]) -> list[Sequence]:
        """Return running sequences without which a waiting one fits: those of the victims that belong to one part.

        All of them where blocks are free already, none where it would not fit.
        """
        for part in self._by_preference(sequence):
            shortages = self._shortages(sequence, part)
            if max(shortages) <= 0:
                return list(victims)
            own = [victim for victim in victims if victim.part == part.number]
            num_free = part.pool.num_freed_by([victim.block_table for victim in own], self._match(sequence, part)[0])
            num_free += sum(map(self._promised, own))
            freed = [num_free, *self.windows.num_freed_by(own), len(own)]  # The last for states, if there are any.
            if all(shortage <= count for shortage, count in zip(shortages, freed, strict=False)):
                return own
        return []

    @staticmethod
    def num_counted(sequence: Sequence) -> int:
        """Return how many blocks that keep all tokens a running sequence holds or was promised."""
        return max(sequence.expected_blocks, len(sequence.block_table))

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence its prefix hits and new blocks for the rest of its tokens."""
        if len(self.parts) > 1:
            assert sequence.budget is None, "evictions have one part"
            parts = self._by_preference(sequence)
            sequence.part = next((part for part in parts if self._fits(sequence, part)), parts[0]).number
        self._place(sequence)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.num_prefix_queries += sequence.num_prompt_tokens
            self.num_prefix_hits += sequence.num_cached_tokens
            num_restored = sequence.num_restored_blocks * self.block_size
            self.num_device_hits += max(0, sequence.num_cached_tokens - num_restored)

    def _place(self, sequence: Sequence) -> None:
        part = self.parts.of(sequence)
        hits, num_known = self._match(sequence, part)
        part.pool.share(hits)
        if self._hints is not None:
            self._hints.start(sequence, len(hits))
        missing = self._num_needed(sequence, sequence.num_tokens) - len(hits)
        sequence.block_table = hits + part.pool.allocate(missing)
        self.num_budgeted += sequence.budget is not None
        sequence.num_findable_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        # What steps contributed before a preemption is computed again.
        sequence.pooled.clear()
        sequence.expected_blocks = self.expected_blocks(sequence)
        part.num_promised += self._promised(sequence)
        self.windows.open(sequence, len(hits), num_known)
        if self.states is not None:
            sequence.state_slot = self.states.open(sequence.block_digests, len(hits), num_known)

    def evict(self, sequences: Values[Sequence], *, is_landed: bool = True) -> bool:
        """Evict blocks of running sequences whose budgets are full.

        False if the pool has too few for copies, or if the choice needs scores from steps in flight.
        """
        for sequence in filter(self.evictions.is_due, sequences):
            if not (is_landed or sequence.scores is None) or not self.evictions.can_evict(sequence):
                return False
            promised, part = self._promised(sequence), self.parts.of(sequence)
            self.evictions.evict(sequence, part.num_spare)
            part.num_promised += self._promised(sequence) - promised
        return True

    def try_grow(self, sequences: Values[Sequence]) -> bool:
        """Give running sequences the blocks that they lack for their tokens; False, with nothing given, if too few."""
        short = lacking(sequences, self.block_size)
        if self.parts.crowded(short) is not None:
            return False
        if self._has_windows and not self.windows.can_grow(sequences):
            return False
        self.parts.extend(short)
        if self._has_windows:
            for sequence in sequences:
                self.windows.grow(sequence, sequence.num_computed_tokens + 1)
        return True

    def crowded_part(self, sequences: Values[Sequence]) -> int | None:
        """Return the number of a part with too few blocks for these running sequences; None where there is one part."""
        part = self.parts.crowded(lacking(sequences, self.block_size)) if len(self.parts) > 1 else None
        return None if part is None else part.number

    def reach(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens a step can compute: as many as there are blocks for.

        All of them but where layers keep the last tokens only, or the sequence has a budget. `windows.grow` gives the
        blocks.
        """
        start = sequence.num_computed_tokens
        if sequence.budget is not None:
            num_tokens = min(num_tokens, sequence.num_computable_tokens)
        return self.windows.reach(sequence, start + num_tokens) - start

    def cover(self, sequence: Sequence, num_tokens: int) -> int:
        """Let the tables cover `num_tokens` tokens, as far as blocks are free; return how many they cover.

        For one step: `trim` takes back what the sequence did not grow into.
        """
        missing = self._num_needed(sequence, num_tokens) - len(sequence.block_table)
        count = min(missing, self.parts.of(sequence).pool.num_available)
        if count > 0:
            self.parts.extend([sequence] * count)
        num_tokens = min(num_tokens, len(sequence.block_table) * self.block_size + sequence.num_evicted_tokens)
        num_tokens = self.windows.reach(sequence, num_tokens, takes_promised=True)
        self.windows.grow(sequence, num_tokens)
        return num_tokens

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks behind those that the sequence's tokens need."""
        needed = self._num_needed(sequence, sequence.num_tokens + sequence.num_evicted_tokens)
        if needed < len(sequence.block_table):
            promised, part = self._promised(sequence), self.parts.of(sequence)
            part.pool.release(sequence.block_table[needed:])
            del sequence.block_table[needed:]
            sequence.num_told_blocks = min(sequence.num_told_blocks, needed)
            part.num_promised += self._promised(sequence) - promised
        self.windows.trim(sequence)

    def publish(self, written: Values[tuple[Sequence, int]]) -> None:
        """Let others find the blocks that are full, and give back what no later token reads.

        `written` are sequences, each with how many of its first tokens are in its blocks for good.
        """
        if self._cache is not None:
            self.parts.publish(written)
        if self._has_windows:
            for sequence, num_written in written:
                self.windows.publish(sequence, num_written, is_findable=self._cache is not None)

    def next_publish(self, num_written: int) -> int:
        """Return behind how many written tokens, more than `num_written`, `publish` has something to do."""
        return num_written + self._to_publish[num_written % self.block_size]

    def add_state_work(self, scheduled: list[ScheduledSequence], places: Iterable[int]) -> None:
        """Say in shares of a step what becomes of the sequence's state, of a model with recurrent layers.

        Args:
            scheduled: All shares.
            places: Of those where the state may do more than go on: it is the first of the sequence, or fills a block.
        """
        assert self.states is not None, "only models with recurrent layers have states"
        for place in places:
            item = scheduled[place]
            if (work := self.states.plan(item, makes_checkpoints=self._cache is not None)) is not None:
                scheduled[place] = structs.replace(item, state=work)

    def land_states(self, step: ScheduledStep, result: StepResult) -> None:
        """Make the checkpoints of a landed step findable, so that others can start from them."""
        assert self.states is not None, "only models with recurrent layers have states"
        for item, sampled in zip(step.scheduled, result.sampled, strict=True):
            if item.state is None or sampled.error is not None:
                continue
            sequence = item.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if item.state.saves:
                assert self._cache is not None
                num_tokens, _ = item.state.saves[-1]
                self._cache.chain(sequence, (item.start + num_tokens) // self.block_size)
            self.states.land(sequence, item.start, item.state)

    def restart(self, sequence: Sequence) -> bool:
        """Let a running sequence begin again behind the longest prefix of which its state is known.

        False where the blocks that it gives back are not enough, because it shared them: it must be preempted.
        """
        self.release(sequence)
        part = self.parts.of(sequence)
        hits, _ = self._match(sequence, part)
        num_cached = sum(not part.pool.is_in_use(block) for block in hits)
        missing = self._config.num_blocks_for(sequence.num_tokens) - len(hits) + num_cached
        others = self._shortages(sequence, part)[1:]
        if missing > part.pool.num_available or any(shortage > 0 for shortage in others):
            return False
        self._place(sequence)
        return True

    def hide(self, sequence: Sequence) -> None:
        """Take the sequence's blocks out of the prefix cache: their content may be wrong. Other holders keep them."""
        self.parts.of(sequence).pool.unlabel(sequence.block_table)
        self.windows.hide(sequence)
        if self.states is not None:
            self.states.hide(sequence)
        if self._tiers is not None:
            self._tiers.forget(sequence.block_digests)

    def close(self, sequence: Sequence, now: float) -> None:
        """Take all blocks back of a sequence that has ended, and do what it says of them."""
        num_published = sequence.num_findable_blocks
        self.release(sequence)
        if self._hints is not None and sequence.hints is not None:
            self._hints.end(sequence, num_published, now)

    def expire(self, now: float) -> None:
        """End retentions that are due."""
        if self._hints is not None and self._hints.is_used:
            self._hints.expire(now)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back. What they hold stays findable until they are reused."""
        part = self.parts.of(sequence)
        part.num_promised -= self._promised(sequence)
        if sequence.budget is not None and sequence.block_table:
            self.num_budgeted -= 1
            self.evictions.drop(sequence)
            sequence.num_evicted_tokens = 0
            if sequence.scores is not None:
                sequence.scores.reset()
        part.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.expected_blocks = sequence.num_findable_blocks = sequence.num_computed_tokens = 0
        self.windows.close(sequence)
        if self.states is not None and sequence.state_slot is not None:
            self.states.close(sequence)

    def check_integrity(self, holders: list[Sequence], others: Values[Values[int]] = ()) -> None:
        """Assert that exactly these sequences hold blocks, each block as often as it is counted."""
        assert self.num_budgeted == sum(sequence.budget is not None for sequence in holders)
        besides = [*(others[FULL] if others else ()), *self.evictions.check_integrity(holders, self.block_size)]
        for part, own in self.parts.divided(holders):
            assert part.num_promised == sum(map(self._promised, own))
            # Evictions and tiers hold blocks besides; they go with one part.
            part.pool.check_holders([sequence.block_table for sequence in own], () if part.number else besides)
        self.windows.check_integrity(holders, others[1:])
        if self.states is not None:
            self.states.check_integrity([s.state_slot for s in holders if s.state_slot is not None])
            assert all(sequence.state_slot is not None for sequence in holders)

    def can_match(self, sequence: Sequence) -> bool:
        """Return whether the sequence may start behind a known prefix."""
        return self._cache is not None and not sequence.needs_whole_prompt

    def most_hits(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence may start behind: its last token is computed, and has room."""
        most = (sequence.num_tokens - 1) // self.block_size
        return most if sequence.budget is None else min(most, sequence.budget.num_blocks - 1)

    def num_hits(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence would start behind."""
        return len(self._match(sequence, self.parts.of(sequence))[0])

    def digest_of(self, sequence: Sequence, place: int) -> bytes:
        """Return the digest of a full block of a sequence that `can_match`."""
        assert self._cache is not None
        return self._cache.digest(sequence, place)

    def num_promised(self, group: int) -> int:
        """Return how many blocks of a group running sequences were promised, and do not hold yet."""
        whole = sum(part.num_promised for part in self.parts)
        return whole if group == FULL else self.windows.num_promised(group - 1)

    def _count_evicted(self, block: int, digest: bytes) -> None:
        self.num_evicted += 1
        if self._tiers is not None:
            self._tiers.evicted(block, digest)

    def _by_preference(self, sequence: Sequence) -> Values[BlockPart]:
        """Return the parts in the order in which a waiting sequence is admitted to them.

        A known prefix is worth its blocks: where others have more room by more than that, one of them computes it too,
        so that a prefix which many sequences share does not draw all of them to one part.
        """
        if len(self.parts) == 1:
            return list(self.parts)
        return sorted(self.parts, key=lambda part: -len(self._match(sequence, part)[0]) - part.num_spare)

    def _fits(self, sequence: Sequence, part: BlockPart) -> bool:
        return max(self._shortages(sequence, part)) <= 0

    def _match(self, sequence: Sequence, part: BlockPart) -> tuple[list[int], int]:
        """Return the blocks behind which all groups can go on, and how many hold the longest known prefix."""
        if part.cache is None:
            return [], 0
        known = part.cache.match(sequence)[: self.most_hits(sequence)]
        if not known or (not self.windows and self.states is None):
            return known, len(known)
        return known[: part.cache.num_resumable(sequence, len(known))], len(known)

    def _distances(self) -> list[int]:
        """For each offset in a block, return how many more tokens are written until `publish` has something to do."""
        marks = {0, *self.windows.offsets}
        steps = range(1, self.block_size + 1)
        return [
            next(step for step in steps if (offset + step) % self.block_size in marks)
            for offset in range(self.block_size)
        ]

    def expected_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks to count for a waiting sequence."""
        expected = self._config.expected_blocks(sequence.num_tokens, sequence.max_num_tokens)
        return expected if sequence.budget is None else min(expected, sequence.budget.num_blocks)

    def _num_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks hold the first `num_tokens` tokens, without those that were evicted."""
        needed = self._config.num_blocks_for(num_tokens - sequence.num_evicted_tokens)
        return needed if sequence.budget is None else min(needed, sequence.budget.num_blocks)

    def _promised(self, sequence: Sequence) -> int:
        return self.num_counted(sequence) - len(sequence.block_table)
