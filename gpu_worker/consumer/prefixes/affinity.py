"""Joins what a worker holds, what others announce, its offers and its claims, over NATS.

A worker announces and offers nothing before it has heard itself on its own subject: with a login of an earlier version
it may not, and everything is pulled as if no prefix were cached.
"""

from __future__ import annotations

import math
import time
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.prefixes.claims import PrefixClaims
from gpu_worker.consumer.prefixes.held import HeldPrefixes, PrefixChain, prefix_chain
from gpu_worker.consumer.prefixes.messages import (
    AdapterState,
    Answer,
    EngineState,
    Offer,
    PeerMessage,
    decode_peer_message,
)
from gpu_worker.consumer.prefixes.peers import PeerBeat, PeerPrefixes
from gpu_worker.consumer.prefixes.waiting import ANSWER_S, WaitingRequests
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.request_reader import cache_salt
from shared.calls import call_process
from shared.direct_client import DirectClient
from shared.errors import InvalidNameError
from shared.messages import UNDECODABLE, Request, encode
from shared.nats_connection import SEND_ERRORS
from shared.prefixes import MAX_WAIT_S, PrefixNews
from shared.server_clock import ServerClock
from shared.subjects import check_name, peer_subject

WHOLE_EVERY = 5
"""Heartbeats from one that announces all links to the next; those between announce only new links."""


class PeerConnection:
    """The other workers of a model, over NATS."""

    def __init__(self, nats: DirectClient, worker: str, model: str, clock: ServerClock) -> None:
        """Speak as `worker`; the queue's times are of `clock`."""
        self.worker = worker
        self._nats = nats
        self._model = model
        self._clock = clock

    async def listen(self, receive: Callable[[Msg], None]) -> None:
        """Call `receive` with what others say, and first, where the login may, with an empty message of our own."""
        subject = peer_subject(self._model, self.worker)
        await self._nats.subscribe_direct(subject, receive)
        self._nats.send(subject)

    def send(self, worker: str, message: PeerMessage) -> bool:
        """Send a message, which may get lost; return whether it can be sent at all."""
        payload = encode(message)
        if not self._nats.is_connected or len(payload) > self._nats.max_payload:
            return False
        try:
            self._nats.send(peer_subject(self._model, worker), payload)
        except SEND_ERRORS:
            return False
        return True

    async def has_ended(self, worker: str) -> bool:
        """Return whether NATS has no subscriber for a worker; False if it does not answer at once."""
        try:
            await call_process(self._nats, peer_subject(self._model, worker), b"", ANSWER_S)
        except NoRespondersError:
            return True
        except SEND_ERRORS:
            return False
        return False

    def time(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def age_s(self, stored_at: float) -> float:
        """Return for how long a request has been in the queue, which says when it has stored it."""
        return self._clock.now() - stored_at

    def call_later(self, delay: float, callback: Callable[[], object]) -> TimerHandle:
        """Call something on the event loop after `delay` seconds."""
        return get_running_loop().call_later(delay, callback)


class PrefixAffinity:
    """One worker's part in letting requests wait for their prefixes."""

    def __init__(
        self,
        peers: PeerConnection,
        engine: EngineState,
        capacity: PullCapacity,
        block_size: int,
        max_wait_s: float = MAX_WAIT_S,
        most_new: Callable[[], float] = lambda: math.inf,
        adapters: AdapterState | None = None,
    ) -> None:
        """Do nothing before `start`, nor after it if no request may wait at all.

        What leaves more than `most_new()` tokens to compute is not claimed.
        """
        self._peers = peers
        self._engine = engine
        self._max_wait_s = max_wait_s
        self._is_open = False
        self._held = HeldPrefixes(block_size, engine.is_cached)
        self._others = PeerPrefixes()
        self._waiting = WaitingRequests(self._held, self._others, engine, capacity, peers, max_wait_s, adapters)
        self._claims = PrefixClaims(self._held, engine, capacity, peers, most_new, adapters)
        self._num_beats = 0

    async def start(
        self,
        begin: Callable[[QueuedMessage], object],
        give_back: Callable[[QueuedMessage], None],
        wake: Callable[[], None],
    ) -> None:
        """Listen to the other workers."""
        self._waiting.start(begin, give_back, wake)
        self._claims.start(begin)
        if self._max_wait_s:
            await self._peers.listen(self._receive)

    def chain(self, request: Request) -> PrefixChain | None:
        """Return a request's chain, if it has one."""
        return prefix_chain(request, cache_salt(request))

    def waits(self, message: QueuedMessage, request: Request, chain: PrefixChain | None) -> bool:
        """Let a request wait if another worker has enough of its prefix, or its adapter; return whether it does."""
        return self._is_open and self._waiting.take(message, request, chain)

    def note_computed(self, held: HeldRequest) -> None:
        """Take note of a request whose prompt is computed."""
        chain, sequence = held.chain, held.sequence
        if chain is not None and sequence is not None:
            self._held.note(chain, sequence.num_prompt_tokens, sequence.block_digests)

    def review(self) -> None:
        """Claim what there is room for now."""
        self._claims.review()

    def give_back_all(self) -> None:
        """Give what waits back to the queue."""
        self._waiting.give_back_all()

    def stop(self) -> None:
        """Claim nothing any more, and give what waits back to the queue."""
        self._claims.stop()
        self._waiting.give_back_all()

    def news(self) -> PrefixNews | None:
        """Return the next heartbeat's news: all links in every `WHOLE_EVERY`th, new ones in those between."""
        if not self._is_open:
            return None
        self._num_beats += 1
        is_whole = self._num_beats % WHOLE_EVERY == 1
        waiting = self._waiting
        return PrefixNews(
            links=self._held.announced() if is_whole else None,
            new_links=b"" if is_whole else self._held.take_news(),
            waiting=waiting.stream_sequences,
            num_handovers=waiting.num_granted,
            num_in_vain=waiting.num_outlasted,
            num_blank=self._engine.num_blank_blocks,
        )

    def note(self, beat: PeerBeat) -> None:
        """Take note of another worker's heartbeat."""
        if beat.worker != self._peers.worker:
            self._others.note(beat, self._peers.time())

    async def has_ended(self, worker: str) -> bool:
        """Return whether a worker that announces prefixes has certainly ended, or has lost its connection."""
        return self._is_open and await self._peers.has_ended(worker)

    def _receive(self, message: Msg) -> None:
        if not message.data:
            self._is_open = True
            return
        try:
            said = decode_peer_message(message.data)
            # No subject can name its sender otherwise, and each look at the offers would fail.
            check_name(said.worker)
        except (InvalidNameError, *UNDECODABLE):
            return
        if isinstance(said, Offer):
            self._claims.receive_offer(said)
        elif isinstance(said, Answer):
            self._waiting.receive(said)
        else:
            self._claims.receive_grant(said)
