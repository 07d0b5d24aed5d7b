"""Requests that were pulled here and wait, for a bounded time, for a worker with more of their prefix or their adapter.

A request waits for at most the time that this saves, and no longer than its deadline leaves. Its place here is
kept until the holders have answered. If one of them will have room later, the place is free meanwhile; a request whose
time is over begins here, or, without room, goes back to the queue. What has had a turn, or is suspected, never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from gpu_worker.consumer.prefixes.held import HeldPrefixes, PrefixChain
from gpu_worker.consumer.prefixes.messages import (
    MAX_OFFERED_LINKS,
    AdapterState,
    Answer,
    EngineState,
    Grant,
    Offer,
    Peers,
    Timer,
)
from gpu_worker.consumer.prefixes.peers import PeerPrefixes
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.queued_message import QueuedMessage
from shared.adapter_calls import is_digest
from shared.messages import Request
from shared.prefixes import MAX_WAIT_S, MAX_WAITING

ANSWER_S = 0.25
"""Within that time a worker that lives answers an offer, and confirms a grant."""
ROOM_ANSWER_S = 0.05
"""The same where no prefix is asked for, but more room."""
MIN_WAIT_S = 0.005
"""What saves less is not worth asking for."""

_Offers = dict[str, tuple[float, Offer]]
"""For how long a request may wait for each worker, in seconds, and what that one is offered."""


@dataclass(slots=True)
class _Waiting:
    """A request that waits.

    Attributes:
        later: Workers that will have room later.
        ends_at: Monotonic seconds at which its time is over.
        keeps_place: Its place here is kept.
    """

    message: QueuedMessage
    asked: set[str]
    ends_at: float
    later: set[str] = field(default_factory=set)
    granted: str | None = None
    keeps_place: bool = True
    timer: Timer | None = None


@dataclass(eq=False)
class WaitingRequests:
    """Offers requests to the holders of their prefixes, and grants each to the first one that claims it.

    Attributes:
        num_granted: Requests that went to a holder of their prefix.
        num_outlasted: Requests whose time was over before a holder had room, or that none has claimed.
    """

    _held: HeldPrefixes
    _others: PeerPrefixes
    _engine: EngineState
    _capacity: PullCapacity
    _peers: Peers
    _max_wait_s: float = MAX_WAIT_S
    _adapters: AdapterState | None = None
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _num_offered: int = 0
    num_granted: int = 0
    num_outlasted: int = 0
    _begin: Callable[[QueuedMessage], object] = field(init=False)
    _give_back: Callable[[QueuedMessage], None] = field(init=False)
    _wake: Callable[[], None] = field(init=False)

    def start(
        self,
        begin: Callable[[QueuedMessage], object],
        give_back: Callable[[QueuedMessage], None],
        wake: Callable[[], None],
    ) -> None:
        """Call `begin` with what need not wait any more, `give_back` with it where there is no room.

        `wake` is called when a place is free again.
        """
        self._begin, self._give_back, self._wake = begin, give_back, wake

    @property
    def stream_sequences(self) -> tuple[int, ...]:
        """Of the requests that wait here."""
        return tuple(waiting.message.stream_seq for waiting in self._waiting.values())

    def take(self, message: QueuedMessage, request: Request, chain: PrefixChain | None) -> bool:
        """Let a request wait if another worker has enough of its prefix, or its adapter; return whether it does."""
        adapter = request.adapter if request.adapter is not None and is_digest(request.adapter) else None
        if (chain is None and adapter is None) or request.emitted or request.epoch or request.probation:
            return False
        now = self._peers.time()
        if len(self._waiting) >= MAX_WAITING:
            return False
        offers = self._offers(message, request, chain, adapter, now)
        longest_s = max((wait_s for wait_s, _ in offers.values()), default=0.0)
        if longest_s < MIN_WAIT_S:
            return False
        self._num_offered += 1
        asked = {
            worker
            for worker, (_, offer) in offers.items()
            if self._peers.send(worker, replace(offer, number=self._num_offered, expires_s=longest_s))
        }
        if not asked:
            return False
        waiting = self._waiting[self._num_offered] = _Waiting(message, asked, now + longest_s)
        self._capacity.reserve(1)
        self._watch(self._num_offered, waiting, min(ANSWER_S, longest_s))
        return True

    def _offers(
        self, message: QueuedMessage, request: Request, chain: PrefixChain | None, adapter: str | None, now: float
    ) -> _Offers:
        """Return what others are offered: empty memory draws no request away from a worker that has its adapter."""
        own, having = self._adapters, [] if adapter is None else self._others.having(adapter, now)
        is_here = adapter is not None and own is not None and own.is_resident(adapter)
        offers: _Offers = {}
        if chain is not None:
            offers = self._prefix_offers(message, request, chain, now, may_move=not (is_here or having))
        if own is None or not own.load_s or is_here or not having:
            return offers
        num_tokens = 1 if chain is None else int(chain.num_bytes / self._held.bytes_per_token)
        rate, load_s = self._engine.stats.expected_prefill_rate, min(own.load_s, self._max_wait_s)
        wait_s = self._left_s(message, request, load_s, num_tokens / rate if rate else 0.0)
        if wait_s >= MIN_WAIT_S:
            for worker in having:
                longer_s, offer = offers.get(worker, (wait_s, self._offer((), num_tokens, 0)))
                offers[worker] = max(wait_s, longer_s), replace(offer, adapter=adapter)
        return offers

    def _prefix_offers(
        self, message: QueuedMessage, request: Request, chain: PrefixChain, now: float, may_move: bool
    ) -> _Offers:
        """Return what workers that hold more of its prefix are offered, or, where none does, those with more memory.

        The latter only if the request `may_move` for that alone.
        """
        holders = self._others.holders({link: place for place, link in enumerate(chain.links)}, now)
        num_tokens = int(chain.num_bytes / self._held.bytes_per_token)
        own = self._held.longest(chain.links)
        num_held = 0 if own is None else own.num_tokens
        waits_s: dict[str, tuple[float, int]] = {}
        # The holder may have evicted the end since it announced it: ask for earlier links too.
        last_first = max(0, len(chain.links) - MAX_OFFERED_LINKS)
        for place, worker in holders:
            saved = num_tokens * chain.share(place) - num_held
            wait_s = self._wait_s(message, request, saved, num_tokens, worker)
            if wait_s >= MIN_WAIT_S:
                waits_s[worker] = (wait_s, min(place, last_first))
        if not waits_s and may_move and (own is None or own.is_shared):
            # A conversation that begins here would stay here: others may have more memory for it.
            num_blank = self._engine.num_blank_blocks + self._capacity.num_blocks_for(num_tokens)
            left_s = self._left_s(message, request, ROOM_ANSWER_S, 0.0)
            waits_s = {worker: (left_s, len(chain.links)) for worker in self._others.emptier(num_blank, now)}
        return {
            worker: (wait_s, self._offer(chain.links[first : first + MAX_OFFERED_LINKS], num_tokens, num_held))
            for worker, (wait_s, first) in waits_s.items()
        }

    def receive(self, answer: Answer) -> None:
        """Act on an answer of another worker."""
        waiting, worker = self._waiting.get(answer.number), answer.worker
        if waiting is None or worker not in waiting.asked | waiting.later | {waiting.granted}:
            return
        if answer.reply == "decline":
            self._others.note_asked(worker, has_taken=False)
        if waiting.granted is not None:
            if worker == waiting.granted:
                self._confirm(answer)
            return
        waiting.asked.discard(worker)
        waiting.later.discard(worker)
        if answer.reply == "claim":
            self._grant(answer.number, waiting, worker)
            return
        if answer.reply == "later" and self._others.is_reliable(worker):
            waiting.later.add(worker)
        if waiting.asked:
            return
        if not waiting.later:
            self._end(answer.number)
            return
        self._leave_place(waiting)
        self._watch(answer.number, waiting, waiting.ends_at - self._peers.time())

    def _confirm(self, answer: Answer) -> None:
        if answer.reply == "taken":
            self._remove(answer.number)
            self._others.note_asked(answer.worker, has_taken=True)
            self.num_granted += 1
        elif answer.reply == "decline":
            self._end(answer.number)

    def give_back_all(self) -> None:
        """Let no request wait here any more: others take them."""
        for number in list(self._waiting):
            self._give_back(self._remove(number).message)

    def _offer(self, links: tuple[bytes, ...], num_tokens: int, num_held: int) -> Offer:
        """Return the offer; `number` and `expires_s` are not known yet."""
        return Offer(
            self._peers.worker,
            0,
            links,
            num_tokens,
            num_held,
            self._engine.stats.waiting_tokens,
            self._capacity.num_interactive,
            self._engine.num_blank_blocks,
            0.0,
        )

    def _wait_s(self, message: QueuedMessage, request: Request, saved: float, num_tokens: int, worker: str) -> float:
        """Return for how long a request may still wait for a worker that saves it this many tokens of prefill."""
        rate = self._engine.stats.expected_prefill_rate or self._others.prefill_rate(worker)
        if not rate or saved <= 0:
            return 0.0
        return self._left_s(message, request, min(saved / rate, self._max_wait_s), num_tokens / rate)

    def _left_s(self, message: QueuedMessage, request: Request, longest_s: float, computing_s: float) -> float:
        """Return the rest of a wait, by the request's age and its deadline, before which it has to be computed."""
        age_s = max(0.0, self._peers.age_s(message.stored_at))
        left_s = longest_s - age_s
        if request.deadline is not None:
            left_s = min(left_s, request.deadline - message.stored_at - age_s - computing_s)
        return left_s

    def _watch(self, number: int, waiting: _Waiting, delay: float) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
        waiting.timer = self._peers.call_later(max(0.0, delay), lambda: self._time_out(number))

    def _time_out(self, number: int) -> None:
        """Begin a request whose wait is over; distrust workers that did not answer, or had no room all that time."""
        waiting = self._waiting[number]
        now = self._peers.time()
        for worker in waiting.asked if waiting.granted is None else (waiting.granted,):
            self._others.distrust(worker, now)
        if waiting.granted is None and waiting.later and now < waiting.ends_at:
            waiting.asked.clear()
            self._leave_place(waiting)
            self._watch(number, waiting, waiting.ends_at - now)
            return
        for worker in waiting.later:
            self._others.note_asked(worker, has_taken=False)
        self._end(number)

    def _grant(self, number: int, waiting: _Waiting, worker: str) -> None:
        message = waiting.message
        grant = Grant(self._peers.worker, number, message.subject, message.data, message.ack_subject)
        waiting.granted = worker
        if not self._peers.send(worker, grant):
            self._end(number)
            return
        self._watch(number, waiting, ANSWER_S)

    def _leave_place(self, waiting: _Waiting) -> None:
        if waiting.keeps_place:
            waiting.keeps_place = False
            self._capacity.reserve(-1)
            self._wake()

    def _end(self, number: int) -> None:
        self.num_outlasted += 1
        waiting = self._waiting[number]
        if waiting.keeps_place or self._capacity.interactive(0) > 0:
            self._begin(waiting.message)
        else:
            self._give_back(waiting.message)
        self._remove(number)

    def _remove(self, number: int) -> _Waiting:
        waiting = self._waiting.pop(number)
        if waiting.timer is not None:
            waiting.timer.cancel()
        self._leave_place(waiting)
        return waiting
