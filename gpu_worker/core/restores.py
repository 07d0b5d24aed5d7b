"""Brings contents of prefixes back from lower tiers, before sequences start.

Owns the sequences that wait for that: they are in no queue meanwhile, so that others start before them. Their blocks
are held, those that are being written to and those on the device already, and go to the prefix cache at the end. Then
the sequence waits again at its old place, and finds them there as it finds all others. A load that fails, hangs, or
takes longer than computing the tokens leaves the rest to be computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.tiers import FULL, KvTiers, Load, Wanted

STALL_S = 1.0
"""Without progress for so long, a tier hangs."""

_GRACE_S = 0.25


@dataclass(slots=True, eq=False)
class _Restore:
    """A sequence that waits.

    Attributes:
        held: By group, blocks in the order of the prefix: those found on the device, and those that are written to.
        progressed_at: When the last content arrived, as far as was seen.
    """

    sequence: Sequence
    load: Load
    held: dict[int, list[int]]
    wanted: list[Wanted]
    ends_at: float
    progressed_at: float
    num_ended: int = 0

    def is_stuck(self, now: float) -> bool:
        """Return whether nothing has arrived for too long."""
        return now - self.progressed_at > STALL_S

    def is_over(self, now: float) -> bool:
        """Return whether there is nothing more to wait for."""
        return self.num_ended == len(self.wanted) or now > self.ends_at or self.is_stuck(now)


@dataclass(slots=True)
class _Extent:
    """A prefix that a sequence can continue once all of it is on the device: blocks found there, blocks missing."""

    num_blocks: int
    found: dict[int, list[int]] = field(default_factory=dict)
    missing: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)

    @property
    def names(self) -> list[tuple[int, bytes]]:
        """Groups and digests of the missing blocks."""
        return [(group, digest) for group, items in self.missing.items() for _, digest in items]


class Restores:
    """Not thread safe: a part of the scheduler."""

    def __init__(self, tiers: KvTiers, blocks: SequenceBlocks, block_size: int) -> None:
        self._tiers = tiers
        self._blocks = blocks
        self._block_size = block_size
        self._pools: dict[int, BlockPool] = {FULL: blocks.pool}
        self._pools |= {number: group.pool for number, group in enumerate(blocks.windows, start=1)}
        self._state_group = len(self._pools)
        self._by_sequence: dict[Sequence, _Restore] = {}

    def __len__(self) -> int:
        return len(self._by_sequence)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return sum(sequence.num_tokens for sequence in self._by_sequence)

    def has_news(self, now: float) -> bool:
        """Return whether `land` has something to do."""
        return any(each.load.num_ended > each.num_ended or each.is_over(now) for each in self._by_sequence.values())

    def begin(self, sequence: Sequence, now: float) -> bool:
        """Begin to restore the prefix of a sequence, which fits; return False where nothing is gained by that."""
        if sequence.was_restored or sequence.is_on_trial or not self._blocks.can_match(sequence):
            return False
        extent = self._extent(sequence)
        gained = extent.num_blocks - self._blocks.num_hits(sequence)
        num_tokens = gained * self._block_size
        if gained <= 0 or not self._has_room(extent) or not self._tiers.pays(extent.names, num_tokens):
            return False
        sequence.was_restored = True
        held, wanted = self._hold(extent)
        rate = self._tiers.prefill_rate
        ends_at = now + (num_tokens / rate + _GRACE_S if rate > 0 else 60.0)
        load = self._tiers.load(sequence.salt, wanted)
        self._by_sequence[sequence] = _Restore(sequence, load, held, wanted, ends_at, now)
        return True

    def land(self, now: float) -> list[Sequence]:
        """Return the sequences that need not wait any more."""
        landed = []
        for restore in list(self._by_sequence.values()):
            num_ended = restore.load.num_ended
            if num_ended > restore.num_ended:
                restore.num_ended, restore.progressed_at = num_ended, now
            if restore.is_over(now):
                if restore.is_stuck(now):
                    self._tiers.suspend()
                self._end(restore)
                landed.append(restore.sequence)
        return landed

    def cancel(self, sequence: Sequence) -> bool:
        """Let a sequence wait no more that has been finished; return False where it did not."""
        restore = self._by_sequence.get(sequence)
        if restore is not None:
            self._end(restore)
        return restore is not None

    def end_all(self) -> None:
        """Let go of everything."""
        for restore in list(self._by_sequence.values()):
            self._end(restore)

    def held(self, group: int) -> list[int]:
        """Return the blocks of a group that are held, each as often as it is."""
        return [block for restore in self._by_sequence.values() for block in restore.held.get(group, ())]

    def _extent(self, sequence: Sequence) -> _Extent:
        tiers, pool, digest_of = self._tiers, self._blocks.pool, self._blocks.digest_of
        num_blocks = 0
        for place in range(self._blocks.most_hits(sequence)):
            digest = digest_of(sequence, place)
            if pool.find(digest) is None and not tiers.has(FULL, digest):
                break
            num_blocks += 1
        digests, count = sequence.block_digests, -1
        while num_blocks != count:
            count = num_blocks
            for number, rule in enumerate(self._blocks.rules, start=1):
                num_blocks = rule.resumable(digests, num_blocks, partial(tiers.has, number))
        extent = _Extent(num_blocks)
        self._look_up(extent, FULL, digests, range(num_blocks))
        for number, group in enumerate(self._blocks.windows, start=1):
            first = min(num_blocks, group.first_needed(num_blocks * self._block_size))
            self._look_up(extent, number, digests, range(first, num_blocks))
        states = self._blocks.states
        if num_blocks and states is not None and not states.has(digests[num_blocks - 1]):
            extent.missing[self._state_group] = [(num_blocks, digests[num_blocks - 1])]
        return extent

    def _look_up(self, extent: _Extent, group: int, digests: list[bytes], places: range) -> None:
        pool = self._pools[group]
        found, missing = extent.found.setdefault(group, []), extent.missing.setdefault(group, [])
        for place in places:
            block = pool.find(digests[place])
            if block is None:
                missing.append((place, digests[place]))
            else:
                found.append(block)

    def _has_room(self, extent: _Extent) -> bool:
        """Return whether the pools have the blocks, apart from those that were promised to others."""
        for group, pool in self._pools.items():
            num_taken = sum(not pool.is_in_use(block) for block in extent.found[group])
            promised = self._blocks.num_promised(group)
            if len(extent.missing[group]) + num_taken > pool.num_available - promised:
                return False
        states = self._blocks.states
        # One for the state, and one for the sequence that starts from it.
        return self._state_group not in extent.missing or (states is not None and states.num_available >= 2)

    def _hold(self, extent: _Extent) -> tuple[dict[int, list[int]], list[Wanted]]:
        held: dict[int, list[int]] = {}
        wanted: list[Wanted] = []
        for group, pool in self._pools.items():
            pool.share(extent.found[group])
            new = pool.allocate(len(extent.missing[group]))
            held[group] = extent.found[group] + new
            pairs = zip(extent.missing[group], new, strict=True)
            wanted += [Wanted(group, digest, block) for (_, digest), block in pairs]
        for num_blocks, digest in extent.missing.get(self._state_group, ()):
            assert self._blocks.states is not None
            slot = self._blocks.states.hold(num_blocks)
            held[self._state_group] = [slot]
            # A state is of use at the end of the prefix alone, and goes first: it is one piece.
            wanted.insert(0, Wanted(self._state_group, digest, slot))
        return held, wanted

    def _end(self, restore: _Restore) -> None:
        del self._by_sequence[restore.sequence]
        for wanted, has_arrived in zip(restore.wanted, restore.load.end(), strict=True):
            if wanted.group == self._state_group:
                assert self._blocks.states is not None
                self._blocks.states.let_go(wanted.block, wanted.digest if has_arrived else None)
            elif has_arrived:
                self._pools[wanted.group].label(wanted.block, wanted.digest)
                restore.sequence.num_restored_blocks += wanted.group == FULL
        for group, pool in self._pools.items():
            pool.release(restore.held[group])
