"""Who starts, and who is preempted for that.

A sequence starts when it fits the pools and there is a slot; the tenant served least goes first (`VirtualCounters`). A
tenant that uses more than its share of the slots, or of the blocks, gives way to one that uses less: its latest
sequences are preempted, but never the first in order, so that one always ends. A lone tenant may use everything. Batch
sequences start only while no interactive one waits, and are preempted for any. No sequence is preempted while a step is
in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum, auto
from operator import attrgetter

from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.waiting_queue import FairQueue

_EQUAL = 1e-9
"""Shares of use that differ by less are equal: they are sums of fractions."""

# Looking whether a sequence has room costs time, and what it may pass is seldom more than this.
_MAX_PASSED = 8


class Room(Enum):
    """Whether there is room for a waiting sequence, after preempting others for it if need be."""

    YES = auto()
    NO = auto()
    AFTER_LANDING = auto()
    """A sequence would have to be preempted, which waits until the steps in flight have landed."""


class _StepTokens:
    """The tokens that a step has left for a prompt, behind decodes and the prompts whose turn comes before it."""

    def __init__(self, num_tokens: int, live: LiveSequences) -> None:
        self._num_tokens = num_tokens
        self._counters = live.waiting["interactive"].counters
        self._has_several_keys = live.has_several_keys("interactive")
        # By tenant and key, and one of the sequences.
        self._wanted: dict[tuple[str, str], tuple[int, Sequence]] = {}
        for sequence in live.running.catching_up["interactive"].values():
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        share = (sequence.tenant, sequence.key) if self._has_several_keys else ("", "")
        num_tokens, _ = self._wanted.get(share, (0, sequence))
        self._wanted[share] = num_tokens + sequence.num_computable_tokens, sequence

    def for_prompt_of(self, sequence: Sequence) -> int:
        """Return how many tokens are left for a sequence that waits; none for others' if it is 0 or less."""
        if not self._has_several_keys:
            return self._num_tokens - self._wanted.get(("", ""), (0, sequence))[0]
        own, turn = (sequence.tenant, sequence.key), self._counters.turn(sequence)
        before = [
            num_tokens
            for share, (num_tokens, other) in self._wanted.items()
            if share == own or self._counters.turn(other) < turn
        ]
        return self._num_tokens - sum(before)


class Admission:
    """Moves sequences between the waiting queues and the running set."""

    def __init__(self, config: SchedulerConfig, blocks: SequenceBlocks, live: LiveSequences) -> None:
        self._config = config
        self._blocks = blocks
        self._live = live
        self._used: dict[str, float] = {}
        self.num_preemptions = 0

    def admit_interactive(self, now: float) -> bool:
        """Start waiting interactive sequences in order, as long as this step has tokens and the pool has blocks.

        False when a sequence would have to be preempted while a step is in flight.
        """
        queue, running = self._live.waiting["interactive"], self._live.running
        self._live.settle("interactive")
        self._used = self._use_by_tenant() if self._has_several_tenants else {}
        if not self._used and len(running) >= self._config.max_num_seqs and not running.num_batch:
            return True
        left = _StepTokens(self._config.max_num_batched_tokens - len(running.decoding["interactive"]), self._live)
        while (room := self._start_one(queue, left, now)) is Room.YES:
            pass
        return room is Room.NO

    def _start_one(self, queue: FairQueue, left: _StepTokens, now: float) -> Room:
        """Start the interactive sequence whose turn it is, or one that may pass it because there is no room for it."""
        passed: list[Sequence] = []
        num_preemptions = self.num_preemptions
        for sequence in queue.heads():
            if len(passed) == _MAX_PASSED:
                break
            if not all(queue.counters.may_pass(sequence, first) for first in passed):
                continue
            room = self.make_room(sequence) if left.for_prompt_of(sequence) > 0 else Room.NO
            if room is Room.YES and not self._live.try_restore(queue, sequence, now):
                self.start(queue, sequence, now)
                left.add(sequence)
            # A preempted sequence may be the first of a key now: the next step looks at the others afresh.
            if room is not Room.NO or self.num_preemptions > num_preemptions:
                return room
            passed.append(sequence)
        return Room.NO

    def ordered_prompts(self) -> list[Sequence]:
        """Return the interactive sequences that catch up, in the order in which they get the step's tokens."""
        ordered = self._live.running.ordered_catching_up("interactive")
        if len(ordered) > 1 and self._live.has_several_keys("interactive"):
            # Python's sort is stable.
            ordered.sort(key=self._live.waiting["interactive"].counters.turn)
        return ordered

    def make_room(self, sequence: Sequence) -> Room:
        """Preempt others for a waiting sequence if need be, and return whether it can start."""
        if self.fits(sequence):
            return Room.YES
        victims = self._victims(sequence) or self._victims_of_others(sequence)
        if victims and self._live.in_flight:
            return Room.AFTER_LANDING
        while victims:
            victim = victims.pop()
            if self._used and victim.lane == "interactive":
                self._used[victim.tenant] -= self._cost(victim)
            self.preempt(victim)
            if self.fits(sequence):
                return Room.YES
        return Room.NO

    def fits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence can start beside those that run."""
        num_running = len(self._live.running)
        if num_running == 0 and not self._live.in_flight and not self._live.num_restoring:
            return True
        return num_running < self._config.max_num_seqs and self._blocks.fits(sequence)

    def start(self, queue: FairQueue, sequence: Sequence, now: float) -> None:
        """Start a sequence that fits: the first of its key in a queue."""
        queue.take(sequence)
        self._blocks.admit(sequence)
        queue.counters.start(sequence)
        sequence.status = SequenceStatus.RUNNING
        if self._used and sequence.lane == "interactive":
            self._used[sequence.tenant] += self._cost(sequence)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
        self._live.running.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence out, which no step in flight names; it waits at its old place."""
        self._live.preempt(sequence)
        self.num_preemptions += 1

    def worst(self, part: int | None = None) -> Sequence:
        """Return the running sequence to preempt first when blocks run out: of all, or of those of a part.

        One of the batch lane, then of the lowest priority, then of the tenant that uses most, then the latest.
        """
        running = [each for each in self._live.running if part is None or each.part == part]
        worst = max(running, key=attrgetter("order"))
        if worst.lane == "batch" or not self._has_several_tenants:
            return worst
        used = self._use_by_tenant()
        behind = sorted(running, key=attrgetter("order"))[1:]
        return max(behind, key=lambda other: (-other.priority, used[other.tenant], other.order), default=worst)

    @property
    def _has_several_tenants(self) -> bool:
        return len(self._live.num_of_tenants) > 1

    def _cost(self, sequence: Sequence) -> float:
        """Return the share of the slots or blocks that a sequence uses or would use, whichever is larger, by weight."""
        config = self._config
        num_blocks = self._blocks.num_counted(sequence)
        if sequence.status is not SequenceStatus.RUNNING:
            num_blocks = self._blocks.expected_blocks(sequence)
        return max(1 / config.max_num_seqs, num_blocks / config.num_blocks) / sequence.weight

    def _use_by_tenant(self) -> dict[str, float]:
        used: dict[str, float] = dict.fromkeys(self._live.num_of_tenants, 0.0)
        for sequence in self._live.running:
            if sequence.lane == "interactive":
                used[sequence.tenant] += self._cost(sequence)
        return used

    def _victims_of_others(self, sequence: Sequence) -> list[Sequence]:
        """Return running sequences that make room for one of a tenant that uses less, best first; else none.

        Those of tenants that use more even afterwards, which therefore do not make it give way in turn.
        """
        if sequence.lane != "interactive" or not self._has_several_tenants:
            return []
        running, used = self._live.running, dict(self._used)
        own = used[sequence.tenant] + self._cost(sequence) - _EQUAL
        if max(used.values()) < own:
            return []
        batch = sorted(running.batch(), key=attrgetter("order"))
        by_tenant: dict[str, list[Sequence]] = {}
        for other in sorted(running, key=attrgetter("order"))[1:]:
            if other.lane == "interactive" and other.tenant != sequence.tenant and other.priority <= sequence.priority:
                by_tenant.setdefault(other.tenant, []).append(other)
        victims: list[Sequence] = []
        while by_tenant:
            tenant = max(by_tenant, key=used.__getitem__)
            victim = by_tenant[tenant].pop()
            used[tenant] -= self._cost(victim)
            if used[tenant] >= own:
                victims.append(victim)
            if used[tenant] < own or not by_tenant[tenant]:
                del by_tenant[tenant]

        def is_enough(count: int) -> bool:
            return bool(self._blocks.helpful(sequence, [*victims[:count], *batch]))

        if not victims or not is_enough(len(victims)):
            return []
        count = bisect_left(range(len(victims)), True, lo=1, key=is_enough)
        return self._blocks.helpful(sequence, [*reversed(victims[:count]), *batch])

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the running batch sequences behind it, best first, if preempting them makes room; else none."""
        behind = [other for other in self._live.running.batch() if other.order > sequence.order]
        victims = sorted(behind, key=attrgetter("order"))
        return self._blocks.helpful(sequence, victims)
