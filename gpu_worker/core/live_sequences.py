"""All sequences from `add` to their end, by where they are, and the steps in flight.

A sequence waits, runs, or has ended while steps in flight still name it: these write into its blocks, which go back
when the last step that was planned by then has landed.
"""

from __future__ import annotations

from collections import Counter, deque
from operator import attrgetter

from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.restores import Restores
from gpu_worker.core.running_set import RunningSet
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.step import ScheduledStep
from gpu_worker.core.waiting_queue import FairQueue
from shared.messages import Lane


class LiveSequences:
    """Shared by all parts of the scheduler.

    Attributes:
        num_of_tenants: Interactive sequences of each tenant that has any; kept beside `num_of_keys` because admission
            asks at each step.
        num_of_keys: Sequences of each lane, tenant and key that has any.
        now: Monotonic seconds at which a step was planned last.
    """

    def __init__(
        self, blocks: SequenceBlocks, constraints: SharedConstraints | None = None, restores: Restores | None = None
    ) -> None:
        self._blocks = blocks
        self.restores = restores
        self._constraints = constraints or SharedConstraints()
        self._by_id: dict[str, Sequence] = {}
        self._ended: deque[tuple[int, Sequence]] = deque()
        self.waiting: dict[Lane, FairQueue] = {"interactive": FairQueue(), "batch": FairQueue()}
        self.running = RunningSet()
        self.num_of_tenants: Counter[str] = Counter()
        self.num_of_keys: dict[Lane, Counter[tuple[str, str]]] = {"interactive": Counter(), "batch": Counter()}
        self.in_flight: deque[ScheduledStep] = deque()
        self._tried: dict[str, Sequence] = {}
        self.num_planned = self.num_landed = 0
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, sequence_id: str) -> Sequence | None:
        """Return the sequence of this id that has not finished."""
        return self._by_id.get(sequence_id)

    @property
    def on_trial(self) -> list[Sequence]:
        """The batch sequences that are on trial: one or none, as the consumer begins them."""
        return [sequence for sequence in self._tried.values() if sequence.is_on_trial]

    @property
    def ordered(self) -> list[Sequence]:
        """The sequences that have not finished, best first."""
        return sorted(self._by_id.values(), key=attrgetter("order"))

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        self._by_id[sequence.id] = sequence
        if sequence.constraint is not None:
            self._constraints.add(sequence.id, sequence.constraint)
        if sequence.is_on_trial:
            self._tried[sequence.id] = sequence
        sequence.num_input_tokens = len(sequence.token_ids)
        self.num_of_keys[sequence.lane][sequence.tenant, sequence.key] += 1
        if sequence.lane == "interactive":
            self.num_of_tenants[sequence.tenant] += 1
        self.settle(sequence.lane)
        self.waiting[sequence.lane].push(sequence)

    def has_several_keys(self, lane: Lane) -> bool:
        """Whether several keys have sequences in a lane."""
        return len(self.num_of_keys[lane]) > 1

    def settle(self, lane: Lane, *, is_forced: bool = False) -> None:
        """Bring the counters of a lane up to date, if several keys have sequences there or it `is_forced`."""
        if is_forced or self.has_several_keys(lane):
            running, num_of_lane = self.running, len(self.running) if lane == "batch" else 0
            is_lane_alone = running.num_batch == num_of_lane
            self.waiting[lane].counters.settle(running if is_lane_alone else [s for s in running if s.lane == lane])

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence out, which no step in flight names; it waits at its old place."""
        self.waiting[sequence.lane].counters.charge(sequence)
        self.running.remove(sequence)
        num_computed_tokens = sequence.num_computed_tokens
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        sequence.record.preempt(num_computed_tokens, self.now)
        sequence.was_restored = False
        self.waiting[sequence.lane].push(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out for good; its blocks go back at once, or when no step in flight can use them."""
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status = SequenceStatus.FINISHED
        sequence.next_publish = 0
        del self._by_id[sequence.id]
        self._constraints.remove(sequence.id)
        self._tried.pop(sequence.id, None)
        self._count_out(sequence)
        if not was_running:
            if self.restores is None or not self.restores.cancel(sequence):
                self.waiting[sequence.lane].discard(sequence)
            return
        self.waiting[sequence.lane].counters.charge(sequence)
        self.running.remove(sequence)
        if self._is_in_flight(sequence):
            self._ended.append((self.num_planned, sequence))
        else:
            self._blocks.close(sequence, self.now)

    @property
    def num_restoring(self) -> int:
        """Sequences that wait for their prefixes."""
        return 0 if self.restores is None else len(self.restores)

    def try_restore(self, queue: FairQueue, sequence: Sequence, now: float) -> bool:
        """Let the first sequence of a key, which fits, wait for its prefix if that is in a lower tier."""
        if self.restores is None or not self.restores.begin(sequence, now):
            return False
        queue.take(sequence)
        return True

    def end_restores(self, now: float) -> None:
        """Let sequences wait at their old place whose prefixes have come, or do not come."""
        if self.restores is not None:
            for sequence in self.restores.land(now):
                self.waiting[sequence.lane].push(sequence)

    def add_step(self, step: ScheduledStep) -> None:
        """Add a step that was planned to those in flight; an empty one has no number of its own."""
        self.in_flight.append(step)
        if not step.is_empty:
            self.num_planned = step.step

    def land(self, step: ScheduledStep) -> None:
        """Remove the oldest step in flight, which has landed, and give back blocks that waited for it."""
        assert self.in_flight, "the step is not in flight"
        assert self.in_flight[0] is step, "the step is not the oldest in flight"
        self.in_flight.popleft()
        if not step.is_empty:
            self.release_ended(step.step)

    def release_ended(self, step: int) -> None:
        """Give back the blocks of ended sequences: no step up to number `step` is in flight any more."""
        self.num_landed = step
        if self._blocks.evictions.told:
            self._blocks.evictions.land(step)
        while self._ended and self._ended[0][0] <= step:
            self._blocks.close(self._ended.popleft()[1], self.now)

    def check_integrity(self) -> None:
        """Assert that counters and queues agree, and blocks with both."""
        running, in_flight = self.running, {item.sequence for step in self.in_flight for item in step.scheduled}
        ended = [sequence for _, sequence in self._ended]
        groups = range(1 + len(self._blocks.windows))
        others = [] if self.restores is None else [self.restores.held(group) for group in groups]
        self._blocks.check_integrity([*running, *ended], others)
        running.check_integrity()
        assert len(running) + sum(map(len, self.waiting.values())) + self.num_restoring == len(self._by_id)
        assert all(sequence.block_table for sequence in in_flight), "blocks went back while a step uses them"
        assert in_flight - set(ended) == {sequence for sequence in running if self._is_in_flight(sequence)}
        assert not ended or self.in_flight, "an ended sequence keeps its blocks though no step is in flight"
        for sequence in self._by_id.values():
            items = [item for step in self.in_flight for item in step.scheduled if item.sequence is sequence]
            assert sequence.num_pending_tokens == sum(item.samples for item in items)
            num_written = sequence.num_computed_tokens - sum(item.num_tokens for item in items)
            assert sequence.num_findable_blocks <= num_written // self._blocks.block_size, (
                f"{sequence.id} has published a block before all its KV is written"
            )

    def _count_out(self, sequence: Sequence) -> None:
        counts, share = self.num_of_keys[sequence.lane], (sequence.tenant, sequence.key)
        counts[share] -= 1
        if not counts[share]:
            del counts[share]
        if sequence.lane == "interactive":
            self.num_of_tenants[sequence.tenant] -= 1
            if not self.num_of_tenants[sequence.tenant]:
                del self.num_of_tenants[sequence.tenant]

    def _is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether a step in flight may name the sequence: one that samples for it, or computes a chunk of it."""
        if not self.in_flight:
            return False
        return sequence.num_pending_tokens > 0 or sequence.last_chunk_step > self.num_landed
