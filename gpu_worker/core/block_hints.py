"""Does what clients say of their conversations (`CacheHints`) to the order in which blocks are evicted.

Hints act on blocks without a holder, in all groups of layers and all tiers. So they never stop a sequence, and what a
running sequence reads stays. A sequence that ends retains its blocks, or lets those of its conversation go first. One
whose state supersedes an earlier one lets the earlier blocks go on the device when it starts, because it needs room,
and everywhere when it has ended, because all its digests are known then. A conversation may own very many, so that
between two steps some thousands are spent: where a start finds more, its end has them spent, over several steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sessions import Sessions
from gpu_worker.core.state_slots import StateSlots
from gpu_worker.core.tiers import KvTiers

MAX_SPENT_A_STEP = 4096
"""Digests: some milliseconds of the engine's thread."""


class BlockHints:
    """A part of `SequenceBlocks`."""

    def __init__(self, pools: Values[BlockPool], states: StateSlots | None, tiers: KvTiers | None) -> None:
        self._pools = pools
        self._states = states
        self._tiers = tiers
        self._allowance = MAX_SPENT_A_STEP
        self.sessions = Sessions()

    def start(self, sequence: Sequence, num_hits: int) -> None:
        """Act on a sequence that starts behind `num_hits` blocks, which it holds, and takes others next."""
        digests = sequence.block_digests
        self.sessions.starts_behind(sequence, digests[:num_hits])
        if sequence.hints is not None and sequence.hints.supersedes:
            outdated = self.sessions.spend(sequence, digests, self._allowance)
            self._allowance -= len(outdated)
            self._spend_on_device(outdated)

    def end(self, sequence: Sequence, num_published: int, now: float) -> None:
        """Act on a sequence that has ended, and has given back its blocks; others can find `num_published` of them."""
        hints, digests = sequence.hints, sequence.block_digests[:num_published]
        if hints is None:
            return
        if hints.drop or hints.supersedes:
            self.sessions.end(sequence, () if hints.drop else digests)
            self._spend_outdated()
        if hints.retain_s and not hints.drop:
            self._retain(sequence, digests, now + hints.retain_s)

    def expire(self, now: float) -> None:
        """Retain no longer what was to be retained until now, and spend what the last step left; for each step."""
        self._allowance = MAX_SPENT_A_STEP
        self._spend_outdated()
        for pool in self._pools:
            pool.order.expire(now)
        if self._states is not None:
            self._states.retention.expire(now)

    def _retain(self, sequence: Sequence, digests: list[bytes], until: float) -> None:
        tenant, weight = sequence.tenant, sequence.weight
        for pool in self._pools:
            pool.retain(tenant, weight, digests, until)
        if self._states is not None:
            self._states.retain(tenant, weight, digests, until)
        if self._tiers is not None:
            self._tiers.retain(tenant, weight, digests, until)

    def _spend_outdated(self) -> None:
        digests = self.sessions.pop_outdated(self._allowance)
        self._allowance -= len(digests)
        self._spend_on_device(digests)
        if self._tiers is not None and digests:
            self._tiers.spend(digests)

    def _spend_on_device(self, digests: Iterable[bytes]) -> None:
        for pool in self._pools:
            pool.order.spend(digests)
        if self._states is not None:
            self._states.spend(digests)
