"""Does what clients say of their conversations (`CacheHints`) to the order in which blocks are evicted.

Hints act on blocks without a holder, in all groups of layers and all tiers. So they never stop a sequence, and what a
running sequence reads stays. A sequence that ends retains its blocks, or lets those of its conversation go first. One
whose state supersedes an earlier one lets the earlier blocks go on the device when it starts, because it needs room,
and everywhere when it has ended, because all its digests are known then. A conversation may own very many, so that
between two steps some thousands are spent: where a start finds more, its end has them spent, over several steps. Those
that are to be retained wait in a queue, likewise; choices of one request share most of theirs, which count once. What
is spent leaves the queue: only a sequence that ends later has it retained again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Values
from dataclasses import dataclass
from math import ceil

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sessions import Sessions
from gpu_worker.core.state_slots import StateSlots
from gpu_worker.core.tiers import KvTiers

MAX_DIGESTS_A_STEP = 4096
"""Spent and retained: some milliseconds of the engine's thread."""
CHUNK = 256


@dataclass(slots=True)
class _Retaining:
    """Digests of one sequence that are still to be retained until a time; its number is its place among all so far."""

    number: int
    tenant: str
    weight: float
    digests: list[bytes]
    until: float
    num_done: int = 0


class BlockHints:
    """A part of `SequenceBlocks`; it `is_used` from the first sequence with hints on."""

    def __init__(self, pools: Values[BlockPool], states: StateSlots | None, tiers: KvTiers | None) -> None:
        self._pools = pools
        self._states = states
        self._tiers = tiers
        self._allowance = MAX_DIGESTS_A_STEP
        self._retaining: deque[_Retaining] = deque()
        self._num_queued = 0
        # Both are emptied with the queue. Jobs up to this number no longer retain the digest.
        self._spent: dict[bytes, int] = {}
        # Chunks that were retained, by tenant and last digest, and until when.
        self._retained: dict[tuple[str, bytes], int] = {}
        self.sessions = Sessions()
        self.is_used = False

    def start(self, sequence: Sequence, num_hits: int) -> None:
        """Act on a sequence that starts behind `num_hits` blocks, which it holds, and takes others next."""
        digests = sequence.block_digests
        self.sessions.starts_behind(sequence, digests[:num_hits])
        if sequence.hints is None:
            return
        self.is_used = True
        if sequence.hints.supersedes:
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
            self._num_queued += 1
            until = now + hints.retain_s
            self._retaining.append(_Retaining(self._num_queued, sequence.tenant, sequence.weight, digests, until))
            self._retain()

    def expire(self, now: float) -> None:
        """End retentions that are due, and do the work that the last step left. Call it in each step."""
        self._allowance = MAX_DIGESTS_A_STEP
        self._spend_outdated()
        self._retain()
        for pool in self._pools:
            pool.order.expire(now)
        if self._states is not None:
            self._states.retention.expire(now)

    def _retain(self) -> None:
        """Retain queued digests, in prefix order, within this step's allowance."""
        while self._retaining and self._allowance > 0:
            job = self._retaining[0]
            chunk = job.digests[job.num_done : job.num_done + CHUNK]
            job.num_done += CHUNK
            if job.num_done >= len(job.digests):
                self._retaining.popleft()
            self._allowance -= max(1, self._retain_chunk(job, chunk))
        if not self._retaining:
            self._spent.clear()
            self._retained.clear()

    def _retain_chunk(self, job: _Retaining, chunk: list[bytes]) -> int:
        """Retain the unspent digests of a chunk unless already retained as long; return the number of digests."""
        digests = [digest for digest in chunk if self._spent.get(digest, 0) < job.number]
        if not digests:
            return 0
        if len(digests) == len(chunk):
            key, until = (job.tenant, chunk[-1]), ceil(job.until)
            if self._retained.get(key, until - 1) >= until:
                return 0
            self._retained[key] = until
        for pool in self._pools:
            pool.retain(job.tenant, job.weight, digests, job.until)
        if self._states is not None:
            self._states.retain(job.tenant, job.weight, digests, job.until)
        if self._tiers is not None:
            self._tiers.retain(job.tenant, job.weight, digests, job.until)
        return len(digests)

    def _spend_outdated(self) -> None:
        digests = self.sessions.pop_outdated(self._allowance)
        self._allowance -= len(digests)
        self._spend_on_device(digests)
        if self._tiers is not None and digests:
            self._tiers.spend(digests)

    def _spend_on_device(self, digests: list[bytes]) -> None:
        if digests and self._retaining:
            self._spent.update(dict.fromkeys(digests, self._num_queued))
            self._retained.clear()
        for pool in self._pools:
            pool.order.spend(digests)
        if self._states is not None:
            self._states.spend(digests)
