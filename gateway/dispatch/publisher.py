"""Publication to the interactive stream: fire, and hear of the acknowledgement later, without a task per request.

The gateway has one inbox for acknowledgements. A publication returns as soon as the bytes are with the NATS client;
the acknowledgement gives the flight its stream sequence, or tells why the queue refused it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from msgspec import structs
from nats.aio.msg import Msg

from gateway.dispatch.inflight import Flight
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet
from shared.direct_client import DirectClient
from shared.messages import encode_request
from shared.nats_connection import SEND_ERRORS
from shared.publication import decode_ack
from shared.subjects import Queue, request_subject

RETRY_AFTER_S = 2.0
MAX_SUBJECTS = 1000
# An acknowledgement that takes longer was lost with a connection or a server. Attempts that still run are
# published anew long before that; one that has ended is kept until then, so that its message can be deleted.
ACK_MEMORY_S = 60.0
# "JetStream system temporarily unavailable": the servers of a cluster do not agree on who leads.
_NO_LEADER = 10008

_logger = logging.getLogger(__name__)


class Publisher:
    """Publishes attempts."""

    def __init__(
        self,
        nats: DirectClient,
        fleet: Fleet,
        is_within_share: Callable[[Flight], bool] = lambda flight: False,
        on_stored: Callable[[Flight, int, int], None] = lambda flight, epoch, seq: None,
        on_refused: Callable[[Flight, int, ApiError], None] = lambda flight, epoch, error: None,
        on_no_stream: Callable[[Flight, int], None] = lambda flight, epoch: None,
    ) -> None:
        """Publish over `nats`; `start` must be called once connected.

        `is_within_share` tells whether others give way to a flight, as its tenant has less of a busy fleet. The others
        are called with a flight, the epoch published, and its stream sequence or the queue's refusal; `on_no_stream`
        when there is no stream, or none that is led.
        """
        self._nats = nats
        self._fleet = fleet
        self._is_within_share = is_within_share
        self._loop = asyncio.get_running_loop()
        self._inbox = nats.new_inbox()
        self._numbers = itertools.count()
        self._subjects: dict[str, str] = {}
        # Flight, epoch, and when it was published; the oldest first.
        self._waiting: dict[str, tuple[Flight, int, float]] = {}
        self._on_stored = on_stored
        self._on_refused = on_refused
        self._on_no_stream = on_no_stream

    async def start(self) -> None:
        """Listen for acknowledgements."""
        await self._nats.subscribe_direct(self._inbox + ".*", self._acknowledge)

    def publish(self, flight: Flight) -> None:
        """Publish a flight's attempt; `ApiError` 413 if it is too large for NATS, 503 if NATS is away."""
        queue, attempt = self._queue(flight), flight.attempt()
        if queue != "ready" and attempt.ready is not None:
            # Workers of the version before take it from no other queue, and refuse the field.
            attempt = structs.replace(attempt, ready=None)
        payload = encode_request(attempt)
        if len(payload) > self._nats.max_payload:
            message = (
                f"The request takes {len(payload)} bytes on the wire; at most {self._nats.max_payload} are possible."
            )
            raise ApiError(413, message, param="prompt", code="request_too_large")
        if not self._nats.is_connected:
            raise queue_unavailable()
        reply = f"{self._inbox}.{next(self._numbers)}"
        now = self._loop.time()
        self._forget_lost(now)
        self._waiting[reply] = (flight, flight.epoch, now)
        flight.published_at, flight.log.published_at = now, None
        flight.ack = reply
        flight.queue = queue
        try:
            self._nats.send(self._subject(flight), payload, reply)
        except SEND_ERRORS as error:
            self.forget(flight)
            raise queue_unavailable() from error

    def _queue(self, flight: Flight) -> Queue:
        """Return the queue of a flight; `resumed` only if every worker of its model reads it.

        What had its turn does not wait again behind those who came later, and what others give way to not behind these.
        Workers with a suspect take nothing new.
        """
        if flight.ready is not None and self._fleet.takes(flight.request.model, "ready"):
            return "ready"
        has_turn = flight.has_begun or flight.num_unclaimed > 0 or flight.probation > 0
        if not (has_turn or self._is_within_share(flight)):
            return "interactive"
        takers, workers = self._fleet.takers_of_resumed(flight.request.model)
        return "resumed" if takers == workers else "interactive"

    def _subject(self, flight: Flight) -> str:
        request = flight.request
        if flight.queue != "interactive":
            return request_subject(request.model, flight.queue, request.tenant)
        subject = self._subjects.get(request.model)
        if subject is None:
            if len(self._subjects) >= MAX_SUBJECTS:
                self._subjects.clear()
            subject = self._subjects[request.model] = request_subject(request.model, "interactive", request.tenant)
        return subject

    def forget(self, flight: Flight) -> None:
        """Give up waiting for an acknowledgement."""
        if flight.ack is not None:
            self._waiting.pop(flight.ack, None)
            flight.ack = None

    def _forget_lost(self, now: float) -> None:
        while self._waiting:
            reply, (_, _, published_at) = next(iter(self._waiting.items()))
            if now - published_at <= ACK_MEMORY_S:
                return
            del self._waiting[reply]

    def _acknowledge(self, message: Msg) -> None:
        flight, epoch, _ = self._waiting.pop(message.subject, (None, 0, 0.0))
        if flight is None:
            return
        if flight.ack == message.subject:
            flight.ack = None
        if not message.data:
            # NATS answers with an empty message when no stream listens on the subject.
            self._on_no_stream(flight, epoch)
            return
        ack = decode_ack(message.data)
        if ack.error is None:
            self._on_stored(flight, epoch, ack.seq)
            return
        if ack.error.err_code == _NO_LEADER:
            self._on_no_stream(flight, epoch)
            return
        _logger.warning("request %s was refused: %s", flight.id, ack.error.description, extra=flight.log_fields)
        refusal = queue_unavailable()
        if "exceeded" in ack.error.description:
            text = "The request queue is full. Try again later."
            refusal = ApiError(503, text, code="queue_full", retry_after_s=RETRY_AFTER_S)
        self._on_refused(flight, epoch, refusal)


def queue_unavailable() -> ApiError:
    """Return the error of a request that cannot be queued because NATS or its stream is away."""
    message = "The request queue cannot be reached. Try again shortly."
    return ApiError(503, message, code="queue_unavailable", retry_after_s=RETRY_AFTER_S)
