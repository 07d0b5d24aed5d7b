"""Workers and their queue in virtual time: real schedulers, caches, offers and claims, simulated runners, no network.

Every run of one load and seed is the same. The queue hands out messages as NATS does: in order, what was given back
first, to the workers with room in turn. What workers say to one another takes `LATENCY_S`, and may be lost.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.prefixes.chain import prefix_chain
from gpu_worker.consumer.prefixes.claims import PrefixClaims
from gpu_worker.consumer.prefixes.held import HeldPrefixes
from gpu_worker.consumer.prefixes.messages import Answer, Offer, PeerMessage
from gpu_worker.consumer.prefixes.peers import PeerBeat, PeerPrefixes
from gpu_worker.consumer.prefixes.waiting import WaitingRequests
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.queued_message import QueuedMessage, delivery
from gpu_worker.consumer.request_reader import cache_salt
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence as EngineSequence
from gpu_worker.engine.engine import Engine, EngineStats
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.messages import Request
from shared.prefixes import PrefixNews

LATENCY_S = 0.0003
HEARTBEAT_S = 0.2
WHOLE_EVERY = 5
DEATH_S = 1.0
"""Until a gateway has noticed a death, and publishes again what was lost with it."""

Loses = Callable[[str], bool]


@dataclass(slots=True)
class Job:
    """A request, and what became of it.

    Attributes:
        finished: Called with its generated tokens.
        first_s: Time to first token.
        workers: Those that began it.
    """

    request: Request
    finished: Callable[[list[int]], None]
    sent_at: float = 0.0
    first_s: float | None = None
    is_done: bool = False
    num_prompt: int = 0
    num_cached: int = 0
    workers: list[str] = field(default_factory=list)


class _Timer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualFleet:
    """Owns the time, the queue and the workers.

    Attributes:
        is_lost: Says of what is sent, an announcement or the name of a message's type, whether it is lost.
    """

    def __init__(
        self,
        num_workers: int,
        config: SchedulerConfig,
        *,
        is_affine: bool,
        step_ms: float = 6.0,
        growth: float = 0.005,
        is_lost: Loses = lambda what: False,
    ) -> None:
        """Start workers that wait for prefixes, or, not being `is_affine`, pull alone."""
        self.now = 0.0
        self.is_lost = is_lost
        self.is_affine = is_affine
        self._events: list[tuple[float, int, _Timer]] = []
        self._numbers = itertools.count(1)
        self._queue: deque[int] = deque()
        self.jobs: dict[int, Job] = {}
        self.workers = [VirtualWorker(f"w{number}", self, config, step_ms, growth) for number in range(num_workers)]
        self._turn = 0
        if is_affine:
            for worker in self.workers:
                worker.beat()

    def call_later(self, delay: float, callback: Callable[[], object]) -> _Timer:
        """Call something in `delay` seconds."""
        timer = _Timer(callback)
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), timer))
        return timer

    def run(self, is_over: Callable[[], bool], until: float = float("inf")) -> None:
        """Let time pass until something is over."""
        while self._events and self._events[0][0] <= until and not is_over():
            at, _, timer = heapq.heappop(self._events)
            self.now = max(self.now, at)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()

    def submit(self, job: Job) -> None:
        """Put a request into the queue."""
        number = next(self._numbers)
        job.sent_at = self.now
        self.jobs[number] = job
        self._queue.append(number)
        self.hand_out()

    def give_back(self, number: int) -> None:
        """Deliver a request again, before all others."""
        if not self.jobs[number].is_done:
            self._queue.appendleft(number)
            self.hand_out()

    def hand_out(self) -> None:
        """Deliver what waits to the workers with room, in turn."""
        while self._queue:
            for offset in range(len(self.workers)):
                worker = self.workers[(self._turn + offset) % len(self.workers)]
                if worker.is_alive and worker.capacity.interactive(len(self._queue)) > 0:
                    break
            else:
                return
            self._turn += offset + 1
            number = self._queue.popleft()
            job = self.jobs[number]
            ack = f"$JS.ACK.stream.consumer.1.{number}.1.{round(job.sent_at * 1e9)}.{len(self._queue)}"
            message = delivery("", b"", ack)
            assert message is not None
            worker.pull(message, job)

    def send(self, receiver: str, message: PeerMessage) -> None:
        """Bring a message from one worker to another."""
        worker = next((worker for worker in self.workers if worker.name == receiver), None)
        if worker is not None and not self.is_lost(type(message).__name__):
            self.call_later(LATENCY_S, lambda: worker.receive(message))

    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached."""
        hits = sum(worker.engine_stats.num_prefix_hits for worker in self.workers)
        return hits / max(1, sum(worker.engine_stats.num_prefix_queries for worker in self.workers))


class VirtualWorker:
    """One worker: an engine in virtual time, and its side of the queue."""

    def __init__(self, name: str, fleet: VirtualFleet, config: SchedulerConfig, step_ms: float, growth: float) -> None:
        """Begin idle."""
        self.name = self.worker = name
        self.is_alive = True
        self._fleet = fleet
        self._local = 0.0
        runner = SimulatedRunner(step_ms, range(1000), lambda: self._local, self._sleep, growth=growth)
        self._engine = Engine(Scheduler(config), runner, lambda: self._local)
        self._jobs: dict[str, Job] = {}
        self._is_stepping = False
        self._block_size = config.block_size
        self._inbox: list[EngineSequence] = []
        self._num_beats = 0
        self.engine_stats: EngineStats = self._engine.stats
        self.held = HeldRequests()
        self.capacity = PullCapacity(self.held, config)
        self.prefixes = HeldPrefixes(config.block_size, self._engine.is_cached)
        self.others = PeerPrefixes()
        self.waiting = WaitingRequests(self.prefixes, self.others, self, self.capacity, self)
        self.claims = PrefixClaims(self.prefixes, self, self.capacity, self)
        self.waiting.start(self.begin, lambda message: fleet.give_back(message.stream_seq), fleet.hand_out)
        self.claims.start(self.begin)

    @property
    def stats(self) -> EngineStats:
        """The engine's state after the step that landed last."""
        return self.engine_stats

    @property
    def num_blank_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._engine.num_blank_blocks

    def is_cached(self, digest: bytes) -> bool:
        """Say whether the prefix cache has a block of this digest."""
        return self._engine.is_cached(digest)

    def send(self, worker: str, message: PeerMessage) -> bool:
        """Send a message to another worker."""
        self._fleet.send(worker, message)
        return True

    def time(self) -> float:
        """Return the fleet's time."""
        return self._fleet.now

    def age_s(self, stored_at: float) -> float:
        """Return for how long a request has been in the queue."""
        return self._fleet.now - stored_at

    def call_later(self, delay: float, callback: Callable[[], object]) -> _Timer:
        """Call something in `delay` seconds, if this worker still lives then."""
        return self._fleet.call_later(delay, lambda: callback() if self.is_alive else None)

    def beat(self) -> None:
        """Announce what is held, now and from now on."""
        if not self.is_alive:
            return
        self._num_beats += 1
        is_whole = self._num_beats % WHOLE_EVERY == 1
        held = self.prefixes
        blank = self.num_blank_blocks
        links, new = (held.announced(), b"") if is_whole else (None, held.take_news())
        news = PrefixNews(links, new, num_blank=blank)
        announcement = PeerBeat(worker=self.name, prefill_rate=self.stats.prefill_rate, prefixes=news)
        for other in self._fleet.workers:
            if other is not self and other.is_alive and not self._fleet.is_lost("announcement"):
                other.others.note(announcement, self._fleet.now)
        self._fleet.call_later(HEARTBEAT_S, self.beat)

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

    def pull(self, message: QueuedMessage, job: Job) -> None:
        """Take a request from the queue."""
        request = job.request
        if self._fleet.is_affine and self.waiting.take(message, request, prefix_chain(request, cache_salt(request))):
            return
        self.begin(message)

    def begin(self, message: QueuedMessage) -> None:
        """Give a request to the engine."""
        job = self._fleet.jobs[message.stream_seq]
        if job.is_done or self.held.get(job.request.id) is not None:
            return
        job.workers.append(self.name)
        request = job.request
        token_ids = list(request.token_ids or ())
        chain = prefix_chain(request, cache_salt(request)) if self._fleet.is_affine else None
        held = HeldRequest(request.id, request, message, chain=chain)
        self.held.add(held)
        max_tokens = request.sampling.max_tokens or 1
        sequence = EngineSequence(
            id=self.held.next_sequence_id(held),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=request.sampling,
            max_tokens=max_tokens,
            arrival=self._fleet.now,
            salt=cache_salt(request),
        )
        self.held.admit(held, sequence, cast("Any", None), self.capacity.expected_blocks(len(token_ids), max_tokens))
        self._jobs[sequence.id] = job
        self._inbox.append(sequence)
        self._step()

    def die(self) -> None:
        """Die; the queue delivers again what this worker held when it hears nothing of it."""
        self.is_alive = False
        numbers = [held.message.stream_seq for held in self.held]
        numbers += self.waiting.stream_sequences
        for number in numbers:
            self._fleet.call_later(DEATH_S, partial(self._fleet.give_back, number))

    def drain(self) -> None:
        """Take nothing new, and give back what waits."""
        self.held.is_withdrawn = True
        self.claims.stop()
        self.waiting.give_back_all()

    def _sleep(self, seconds: float) -> None:
        self._local += seconds

    def _step(self) -> None:
        """Compute a step, unless one is under way, and land it when it is due."""
        if self._is_stepping or not self.is_alive:
            return
        for sequence in self._inbox:
            self._engine.add(sequence)
        self._inbox.clear()
        if not self._engine.has_work():
            self.engine_stats = self._engine.stats
            return
        self._is_stepping = True
        self._local = self._fleet.now
        events = self._engine.step()
        self._fleet.call_later(self._local - self._fleet.now, lambda: self._land(events))

    def _land(self, events: Sequence[Any]) -> None:
        self._is_stepping = False
        if not self.is_alive:
            return
        self.engine_stats = self._engine.stats
        for event in events:
            self._advance(event)
        self.claims.review()
        self._fleet.hand_out()
        self._step()

    def _advance(self, event: Any) -> None:
        held = self.held.by_sequence[event.sequence.id]
        job, sequence = self._jobs[event.sequence.id], event.sequence
        if job.first_s is None and event.token_ids:
            job.first_s = self._fleet.now - job.sent_at
            job.num_prompt, job.num_cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
        if event.token_ids and event.num_tokens_before == 0:
            if held.chain is not None:
                self.prefixes.note(held.chain, sequence.num_prompt_tokens, sequence.block_digests)
            shared = sequence.num_cached_tokens // self._block_size
            self.held.expect_blocks(held, max(1, held.num_blocks - shared))
        if event.finish is not None:
            self.held.remove(held)
            if not job.is_done:
                job.is_done = True
                job.finished(sequence.token_ids[sequence.num_prompt_tokens :])
