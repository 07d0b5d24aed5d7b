"""Who starts, and who is preempted for that.

A sequence starts when it fits the pools and there is a slot, in order of lane, priority and arrival. Where interactive
sequences of several tenants wait, the tenant goes first that uses least. A sequence uses its share of the slots, or of
the blocks where that is larger. A tenant that uses more than one whose sequence waits gives way: its latest sequences
are preempted until both would use the same. A lone tenant may use everything. The first running sequence in order is
never preempted for another tenant, so that whatever happens it ends.

Batch sequences are admitted only while no interactive one waits, and are preempted at once when one needs their slot or
their blocks. No sequence is preempted while a step is in flight.
"""

from __future__ import annotations

from operator import attrgetter

from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.waiting_queue import TenantQueues

_EQUAL = 1e-9


class Admission:
    """Moves sequences between the waiting queues and the running set.

    Attributes:
        num_preemptions: Sequences that were preempted so far, each time.
    """

    def __init__(self, config: SchedulerConfig, blocks: SequenceBlocks, live: LiveSequences) -> None:
        """Admit to these blocks."""
        self._config = config
        self._blocks = blocks
        self._live = live
        self.num_preemptions = 0

    def admit_interactive(self, now: float) -> bool:
        """Start waiting interactive sequences in order, as long as this step has tokens and the pool has blocks.

        Returns:
            False when somebody would have to be preempted while a step is in flight.
        """
        queue, running = self._live.waiting["interactive"], self._live.running
        if not queue:
            return True
        queue.used = self._used() if self._is_shared else {}
        if not queue.used and len(running) >= self._config.max_num_seqs and not running.num_batch:
            return True
        num_tokens_left = self._config.max_num_batched_tokens - len(running.decoding["interactive"])
        num_tokens_left -= sum([s.num_uncomputed_tokens for s in running.catching_up["interactive"].values()])
        while num_tokens_left > 0 and (sequence := queue.peek()) is not None:
            has_room = self.make_room(sequence)
            if not has_room:
                return has_room is not None
            if self._live.try_restore(queue, now):
                continue
            self.start(queue, now)
            num_tokens_left -= sequence.num_uncomputed_tokens
        return True

    def make_room(self, sequence: Sequence) -> bool | None:
        """Say whether a waiting sequence can start, after preempting others for it if need be.

        Returns:
            None when somebody would have to be preempted while a step is in flight.
        """
        if self.fits(sequence):
            return True
        victims = self._victims(sequence) or self._victims_of_others(sequence)
        if victims and self._live.in_flight:
            return None
        while victims:
            self._give_up(victims.pop())
            if self.fits(sequence):
                return True
        return False

    def fits(self, sequence: Sequence) -> bool:
        """Say whether a waiting sequence can start beside those that run."""
        num_running = len(self._live.running)
        if num_running == 0 and not self._live.in_flight and not self._live.num_restoring:
            return True
        return num_running < self._config.max_num_seqs and self._blocks.fits(sequence)

    def start(self, queue: TenantQueues, now: float) -> Sequence:
        """Start the first sequence of a queue, which fits."""
        sequence = queue.pop()
        self._blocks.admit(sequence)
        sequence.status = SequenceStatus.RUNNING
        if queue.used:
            queue.used[sequence.tenant] += self._cost(sequence)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
        self._live.running.add(sequence)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence out, which no step in flight names; it waits at its old place."""
        self._live.preempt(sequence)
        self.num_preemptions += 1

    def worst(self) -> Sequence:
        """Return the running sequence to preempt first when blocks run out.

        One of the batch lane, then of the lowest priority, then of the tenant that uses most, then the latest.
        """
        running = self._live.running
        worst = running.worst()
        if worst.lane == "batch" or not self._is_shared:
            return worst
        used = self._used()
        behind = sorted(running, key=attrgetter("order"))[1:]
        return max(behind, key=lambda other: (other.order[:2], used[other.tenant], other.order), default=worst)

    @property
    def _is_shared(self) -> bool:
        """Say whether several tenants have interactive sequences here."""
        return len(self._live.num_of_tenants) > 1

    def _cost(self, sequence: Sequence) -> float:
        """Return the share of the slots or blocks that a sequence uses or would use, whichever is larger."""
        config = self._config
        num_blocks = self._blocks.num_counted(sequence)
        if sequence.status is not SequenceStatus.RUNNING:
            num_blocks = config.expected_blocks(sequence.num_tokens, sequence.max_num_tokens)
        return max(1 / config.max_num_seqs, num_blocks / config.num_blocks)

    def _used(self) -> dict[str, float]:
        """Return what the running interactive sequences of each tenant use."""
        used: dict[str, float] = dict.fromkeys(self._live.num_of_tenants, 0.0)
        for sequence in self._live.running:
            if sequence.lane == "interactive":
                used[sequence.tenant] += self._cost(sequence)
        return used

    def _give_up(self, victim: Sequence) -> None:
        """Preempt a sequence for one that waits."""
        used = self._live.waiting["interactive"].used
        if used and victim.lane == "interactive":
            used[victim.tenant] -= self._cost(victim)
        self.preempt(victim)

    def _victims_of_others(self, sequence: Sequence) -> list[Sequence]:
        """Return running sequences that make room for one of a tenant that uses less, best first; else none.

        Those of tenants that use more even afterwards, which therefore do not make it give way in turn.
        """
        if sequence.lane != "interactive" or not self._is_shared:
            return []
        running, used = self._live.running, dict(self._live.waiting["interactive"].used)
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
            if used[tenant] < own:
                del by_tenant[tenant]
                continue
            victims.append(victim)
            if self._blocks.would_fit_without(sequence, [*victims, *batch]):
                return [*reversed(victims), *batch]
            if not by_tenant[tenant]:
                del by_tenant[tenant]
        return []

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the running batch sequences behind it, best first, if preempting them makes room; else none."""
        behind = [other for other in self._live.running.batch() if other.order > sequence.order]
        victims = sorted(behind, key=attrgetter("order"))
        return victims if self._blocks.would_fit_without(sequence, victims) else []
