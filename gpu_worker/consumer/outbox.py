"""Sends deltas: one frame per reply subject with all deltas that were put in since the last round.

Each turn of the loop is a round. Usually it holds one engine step; when the loop or NATS falls behind, several.
Messages whose last delta is in a frame are acknowledged after it. Deltas for a subject without a subscriber are kept
until there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from nats.errors import ConnectionReconnectingError

from gpu_worker.consumer.frame_subscribers import FrameSubscribers
from gpu_worker.consumer.queued_message import ACK, QueuedMessage, send_ack
from shared.direct_client import DirectClient
from shared.messages import Delta, Frame
from shared.nats_connection import SEND_ERRORS
from shared.task_supervisor import TaskSupervisor

# Bound of all kept deltas in encoded bytes; in memory they take about six times as much. They are sent in one round,
# so it is less than the bytes that may wait on a connection to NATS (8 MiB).
MAX_KEPT_BYTES = 6 << 20

# Timeout of `deliver`. A gateway publishes a suspect again that was not claimed for five seconds, and a later claim
# would be for an attempt that is over. While a worker waits for a delivery it begins nothing new.
DELIVERY_S = 2.0

_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Parcel:
    """What goes to one reply subject, and the messages that are acknowledged afterwards.

    Attributes:
        is_kept: Whether the subject had no subscriber when it was to be sent.
        num_bytes: Encoded size of the deltas; counted only while they are kept.
    """

    deltas: list[Delta] = field(default_factory=list)
    finished: list[QueuedMessage] = field(default_factory=list)
    is_kept: bool = False
    num_bytes: int = 0


class Undelivered(Protocol):
    """Receives the deltas that an outbox did not send."""

    def report_unsent(self, deltas: list[Delta]) -> None:
        """These could not be sent; their requests must not be acknowledged."""

    def report_too_large(self, delta: Delta) -> None:
        """No frame can hold this one."""


@dataclass(eq=False)
class Outbox:
    """Owns unsent deltas; reports to the lane those that could not be sent."""

    _nats: DirectClient
    _worker: str
    _tasks: TaskSupervisor
    _subscribers: FrameSubscribers
    _undelivered: Undelivered
    _is_closing: bool = False
    _parcels: dict[str, _Parcel] = field(default_factory=dict)
    _answers: list[tuple[QueuedMessage, bytes]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None
    _is_due: bool = False
    _waiting: asyncio.Task[None] | None = None
    step: int = 0

    def start(self) -> None:
        """Begin to send."""
        self._loop = asyncio.get_running_loop()

    def put(self, reply: str, delta: Delta, finished: QueuedMessage | None = None) -> None:
        """Send a delta; `finished` is acknowledged afterwards."""
        parcel = self._parcels.get(reply)
        if parcel is None:
            parcel = self._parcels[reply] = _Parcel()
            self._send_soon()
        parcel.deltas.append(delta)
        if finished is not None:
            parcel.finished.append(finished)
        if parcel.is_kept:
            parcel.num_bytes += len(_encode(delta))
            if self._num_kept_bytes > MAX_KEPT_BYTES:
                self._send_soon()

    def withdraw(self, reply: str, request_id: str, epoch: int) -> bool:
        """Take back what has not been sent yet of an attempt; return whether there was something."""
        parcel = self._parcels.get(reply)
        if parcel is None:
            return False
        deltas = parcel.deltas
        parcel.deltas = [delta for delta in deltas if (delta.id, delta.epoch) != (request_id, epoch)]
        if not parcel.deltas and not parcel.finished:
            del self._parcels[reply]
        elif parcel.is_kept and len(parcel.deltas) < len(deltas):
            parcel.num_bytes = self._num_bytes(parcel.deltas)
        return len(parcel.deltas) < len(deltas)

    def send_kept(self) -> None:
        """Soon send the deltas kept for subjects that have subscribers by now."""
        if self._parcels:
            self._send_soon()

    def answer(self, message: QueuedMessage, ack: bytes = ACK) -> None:
        """Answer the delivery of a message in the next round, after everything that waits to be sent."""
        self._answers.append((message, ack))
        self._send_soon()

    async def close(self) -> None:
        """Send the remaining deltas and stop."""
        self._loop = None
        if self._waiting is not None:
            await self._tasks.stop(self._waiting)
        self._is_closing = True
        self.flush()

    def flush(self) -> None:
        """Send and acknowledge everything put in so far, except for subjects without a subscriber."""
        parcels = self._take_sendable()
        answers, self._answers = self._answers, []
        for reply, parcel in parcels.items():
            try:
                self._send(reply, parcel.deltas)
            except SEND_ERRORS as error:
                _log.warning("frame not sent", extra={"reply": reply, "error": repr(error)})
                self._undelivered.report_unsent(parcel.deltas)
            else:
                answers += [(message, ACK) for message in parcel.finished]
        for message, ack in answers:
            send_ack(self._nats, message, ack)

    def send_now(self) -> None:
        """Send everything put in so far without waiting for the next turn, if NATS takes it."""
        if self._loop is not None and self._is_due and self._nats.is_writable:
            self.flush()

    async def deliver(self, reply: str) -> None:
        """Send everything put in so far, and wait until the server has what goes to `reply`.

        Raises:
            Exception: One of `SEND_ERRORS`: the server may have it or not, or it is kept for want of a subscriber.
        """
        self.flush()
        if reply in self._parcels:
            raise ConnectionReconnectingError
        await self._nats.flush(DELIVERY_S)

    @property
    def replies(self) -> list[str]:
        """The reply subjects for which something waits."""
        return list(self._parcels)

    def _take_sendable(self) -> dict[str, _Parcel]:
        sendable: dict[str, _Parcel] = {}
        kept: dict[str, _Parcel] = {}
        for reply, parcel in self._parcels.items():
            is_sendable = self._is_closing or self._subscribers.has(reply)
            (sendable if is_sendable else kept)[reply] = parcel
        for parcel in kept.values():
            if not parcel.is_kept:
                parcel.is_kept, parcel.num_bytes = True, self._num_bytes(parcel.deltas)
        self._parcels = kept
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            reply = max(kept, key=lambda reply: kept[reply].num_bytes)
            _log.warning("frames not sent: their subject has no subscriber", extra={"reply": reply})
            self._undelivered.report_unsent(kept.pop(reply).deltas)
        return sendable

    @property
    def _num_kept_bytes(self) -> int:
        return sum(parcel.num_bytes for parcel in self._parcels.values())

    def _num_bytes(self, deltas: list[Delta]) -> int:
        return sum(len(_encode(delta)) for delta in deltas)

    def _send_soon(self) -> None:
        if self._loop is not None and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._send_round)

    def _send_round(self) -> None:
        if self._loop is None:
            return
        if self._nats.is_writable:
            self._is_due = False
            self.flush()
        else:
            self._waiting = self._tasks.start(self._send_when_writable(), "outbox")

    async def _send_when_writable(self) -> None:
        # If the connection is lost meanwhile, the client buffers messages until it is back.
        with contextlib.suppress(*SEND_ERRORS):
            await self._nats.wait_writable()
        self._is_due = False
        self.flush()

    def _send(self, reply: str, deltas: list[Delta]) -> None:
        payload = _encode(Frame(self._worker, self.step, deltas))
        if len(payload) <= self._nats.max_payload:
            self._nats.send(reply, payload)
        elif len(deltas) > 1:
            half = len(deltas) // 2
            self._send(reply, deltas[:half])
            self._send(reply, deltas[half:])
        else:
            self._undelivered.report_too_large(deltas[0])
