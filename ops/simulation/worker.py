"""One worker in virtual time: the real engine, pull capacity, and rules of prefix affinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from gpu_worker.consumer.heartbeat import INTERVAL_S as HEARTBEAT_S
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.prefixes.affinity import WHOLE_EVERY
from gpu_worker.consumer.prefixes.claims import PrefixClaims
from gpu_worker.consumer.prefixes.held import HeldPrefixes, prefix_chain
from gpu_worker.consumer.prefixes.messages import Answer, Offer, PeerMessage
from gpu_worker.consumer.prefixes.peers import PeerBeat, PeerPrefixes
from gpu_worker.consumer.prefixes.waiting import WaitingRequests
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.request_reader import cache_salt
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence as EngineSequence
from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.core.step import SequenceEvent
from gpu_worker.core.tiers import KvTiers
from gpu_worker.engine.engine import EngineStats
from ops.simulation.engine import Callback, TimedRunner, VirtualClock, VirtualEngine, VirtualTimer
from ops.simulation.outcome import Job, TokenGaps
from shared.prefixes import PrefixNews


class Surroundings(Protocol):
    """What a worker uses of its `VirtualFleet`, whose module imports this one."""

    clock: VirtualClock
    gaps: TokenGaps
    jobs: dict[int, Job]
    is_affine: bool
    is_lost: Callable[[str], bool]

    @property
    def workers(self) -> Sequence[VirtualWorker]: ...  # noqa: D102

    def send(self, receiver: str, message: PeerMessage) -> None: ...  # noqa: D102

    def pull(self, worker: VirtualWorker) -> None: ...  # noqa: D102

    def give_back(self, number: int) -> None: ...  # noqa: D102

    def move(self, job: Job) -> None: ...  # noqa: D102


class VirtualWorker:
    """An engine, and its side of the queue.

    Attributes:
        is_pulling: It waits for requests at the queue; the fleet writes it.
        num_tokens: Tokens generated.
        stats: The engine's state after the step that landed last, where workers tell each other of prefixes.
    """

    def __init__(
        self,
        name: str,
        fleet: Surroundings,
        config: SchedulerConfig,
        runner: TimedRunner,
        tiers: KvTiers | None = None,
    ) -> None:
        self.name = self.worker = name
        self.is_alive = True
        self.is_pulling = False
        self.num_tokens = 0
        self._fleet = fleet
        self._clock = fleet.clock
        self.runner = runner
        self.engine = VirtualEngine(config, runner, fleet.clock, tiers)
        self._config = config
        self._jobs: dict[str, Job] = {}
        self._inbox: list[EngineSequence] = []
        self._timer: VirtualTimer | None = None
        self._landed_at = 0.0
        self._num_decodes = 0
        # Sequences that were preempted, or come from a dead worker: their next token ends a pause.
        self._paused: set[str] = set()
        self._num_beats = 0
        self.stats: EngineStats = self.engine.stats
        self.held = HeldRequests()
        self.capacity = PullCapacity(self.held, config)
        self.prefixes = HeldPrefixes(config.block_size, self.engine.scheduler.is_cached)
        self.others = PeerPrefixes()
        self.waiting = WaitingRequests(self.prefixes, self.others, self, self.capacity, self)
        self.claims = PrefixClaims(self.prefixes, self, self.capacity, self)
        self.waiting.start(self.begin, lambda message: fleet.give_back(message.stream_seq), lambda: fleet.pull(self))
        self.claims.start(self.begin)

    @property
    def num_blank_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.engine.scheduler.num_blank_blocks

    def is_cached(self, digest: bytes) -> bool:
        """Return whether the prefix cache has a block of this digest."""
        return self.engine.scheduler.is_cached(digest)

    def send(self, worker: str, message: PeerMessage) -> bool:
        """Send a message to another worker."""
        self._fleet.send(worker, message)
        return True

    def time(self) -> float:
        """Return the fleet's time."""
        return self._clock.now

    def age_s(self, stored_at: float) -> float:
        """Return for how long a request has been in the queue."""
        return self._clock.now - stored_at

    def call_later(self, delay: float, callback: Callback) -> VirtualTimer:
        """Schedule a callback `delay` seconds from now; it is skipped if this worker has died by then."""
        return self._clock.call_later(delay, lambda: callback() if self.is_alive else None)

    def beat(self) -> None:
        """Announce the held prefixes, now and then periodically."""
        if not self.is_alive:
            return
        self._num_beats += 1
        is_whole = self._num_beats % WHOLE_EVERY == 1
        held = self.prefixes
        links, new = (held.announced(), b"") if is_whole else (None, held.take_news())
        news = PrefixNews(links, new, num_blank=self.num_blank_blocks)
        announcement = PeerBeat(worker=self.name, prefill_rate=self.stats.prefill_rate, prefixes=news)
        for other in self._fleet.workers:
            if other is not self and other.is_alive and not self._fleet.is_lost("announcement"):
                other.others.note(announcement, self._clock.now)
        self._clock.call_later(HEARTBEAT_S, self.beat)

    def receive(self, message: PeerMessage) -> None:
        """Act on a message of another worker."""
        if not self.is_alive:
            return
        if isinstance(message, Offer):
            self.claims.receive_offer(message)
        elif isinstance(message, Answer):
            self.waiting.receive(message)
        else:
            self.claims.receive_grant(message)

    def take(self, message: QueuedMessage, job: Job) -> None:
        """Take a request from the queue."""
        request = job.request
        if (
            self._fleet.is_affine
            and not job.num_moves
            and self.waiting.take(message, request, prefix_chain(request, cache_salt(request)))
        ):
            return
        self.begin(message)

    def begin(self, message: QueuedMessage) -> None:
        """Give a request to the engine."""
        job = self._fleet.jobs.get(message.stream_seq)
        if job is None or self.held.get(job.request.id) is not None:
            return
        request, salt = job.request, cache_salt(job.request)
        prompt = request.token_ids or ()
        chain = prefix_chain(request, salt) if self._fleet.is_affine else None
        held = HeldRequest(request.id, request, message, chain=chain)
        self.held.add(held)
        max_tokens = request.sampling.max_tokens or 1
        sequence = EngineSequence(
            id=self.held.next_sequence_id(held),
            token_ids=[*prompt, *job.emitted],
            num_prompt_tokens=len(prompt),
            sampling=request.sampling,
            max_tokens=max_tokens,
            priority=request.priority,
            arrival=self._clock.now,
            tenant=request.tenant,
            key=request.key or "",
            weight=request.weight,
            salt=salt,
            hints=request.cache_hints,
        )
        num_tokens, num_left = len(sequence.token_ids), max_tokens - len(job.emitted)
        self.held.admit(held, sequence, cast("Any", None), self.capacity.expected_blocks(num_tokens, num_left))
        self._jobs[sequence.id] = job
        if job.emitted:
            self._paused.add(sequence.id)
        self._inbox.append(sequence)
        job.note_claim(self.name)
        if self._timer is None:
            self._step()

    def die(self) -> None:
        """Die; the queue delivers again what this worker held when it hears nothing of it."""
        self.is_alive = False
        if self._timer is not None:
            self._timer.cancel()
        for held in self.held:
            assert held.sequence is not None
            job = self._jobs[held.sequence.id]
            job.emitted, job.last_at = held.sequence.token_ids[held.sequence.num_prompt_tokens :], self._landed_at
            self._fleet.move(job)
        for number in self.waiting.stream_sequences:
            self._fleet.move(self._fleet.jobs[number])

    def drain(self) -> None:
        """Take nothing new, and give back what waits."""
        self.held.is_withdrawn = True
        self.claims.stop()
        self.waiting.give_back_all()

    def _step(self) -> None:
        """Begin what there is to do, and wait until it lands."""
        engine = self.engine
        for sequence in self._inbox:
            engine.add(sequence)
        self._inbox.clear()
        if not engine.has_work():
            self._timer = None
            return
        if (pause_s := engine.pause_s) > 0:
            self._timer = self._clock.call_later(pause_s, self._step)
            return
        begun = engine.submit()
        assert begun is not None, "the engine has work"
        due, step = begun
        for sequence in step.departed:
            if sequence.status is not SequenceStatus.FINISHED:
                self._pause(sequence)
        self._num_decodes = step.num_decodes
        self._timer = self._clock.call_at(due, self._land)

    def _land(self) -> None:
        now = self._clock.now
        events = self.engine.land()
        if self._fleet.is_affine:
            self.stats = self.engine.stats
        self.num_tokens += len(events)
        num_held, num_decodes, num_gaps = len(self.held), self._num_decodes, self._num_decodes
        for place, event in enumerate(events):
            if event.num_tokens_before == 0 or event.sequence.id in self._paused:
                num_gaps -= place < num_decodes
                self._begin_answer(event)
            if event.finish is not None:
                self._end_answer(event)
        if num_gaps:
            self._fleet.gaps.add(now - self._landed_at, num_gaps)
        self._landed_at = now
        if self._fleet.is_affine:
            self.claims.review()
        self._step()
        if len(self.held) < num_held:
            self._fleet.pull(self)

    def _pause(self, sequence: EngineSequence) -> None:
        if sequence.num_output_tokens:
            self._jobs[sequence.id].last_at = self._landed_at
            self._paused.add(sequence.id)

    def _begin_answer(self, event: SequenceEvent) -> None:
        """Act on the first token of a sequence, or the first one behind a pause."""
        now, sequence = self._clock.now, event.sequence
        held, job = self.held.by_sequence[sequence.id], self._jobs[sequence.id]
        if not event.token_ids:
            return
        if event.num_tokens_before:
            self._paused.discard(sequence.id)
            self._fleet.gaps.add(now - job.last_at, 1)
            return
        if job.first_s is None:
            job.note_first(now - job.sent_at, sequence.num_prompt_tokens, sequence.num_cached_tokens)
        if held.chain is not None:
            self.prefixes.note(held.chain, sequence.num_prompt_tokens, sequence.block_digests)
        shared = sequence.num_cached_tokens // self._config.block_size
        if shared:
            self.held.expect_blocks(held, max(1, held.num_blocks - shared))

    def _end_answer(self, event: SequenceEvent) -> None:
        sequence = event.sequence
        job = self._jobs.pop(sequence.id)
        self.held.remove(self.held.by_sequence[sequence.id])
        if not job.is_done:
            # Where a confirmation was lost, two workers have begun it.
            del self._fleet.jobs[job.number]
            job.note_end(sequence.token_ids[sequence.num_prompt_tokens :])
