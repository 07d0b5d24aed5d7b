"""A message taken from a queue, and the acknowledgements of JetStream by which its delivery is answered.

Also what can still be said about a request that cannot be decoded: who asked, and which field is wrong.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from shared.bounds import MAX_EPOCH, ReplySubject, RequestId
from shared.direct_client import DirectClient
from shared.messages import UNDECODABLE, Request, decode_request
from shared.nats_connection import SEND_ERRORS
from shared.request_fields import UnknownFieldError

ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
REDELIVER = b"-NAK"
REDELIVER_SOON = b'-NAK {"delay": 100000000}'
REDELIVER_LATER = b'-NAK {"delay": 10000000000}'
DISCARD = b"+TERM"

# `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>`; newer servers may
# put a domain and an account behind the prefix, and more at the end.
_ACK_PREFIX = ["$JS", "ACK"]
_NUM_TOKENS = 9
_NUM_TOKENS_WITH_DOMAIN = 11

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """One delivery of a message in a JetStream work queue.

    Attributes:
        ack_subject: Subject for acknowledgements of this delivery.
        stream_seq: Names the message in its stream, over all deliveries.
        num_delivered: Which delivery this is, from 1.
        num_pending: Messages that waited in the queue behind it.
        stored_at: When the queue stored it, in Unix seconds by NATS's clock.
        came_at: Monotonic seconds at which it came here.
    """

    subject: str
    data: bytes
    ack_subject: str
    stream_seq: int
    num_delivered: int
    num_pending: int
    stored_at: float = 0.0
    came_at: float = field(default_factory=time.monotonic, compare=False)


def queued_message(message: Msg) -> QueuedMessage | None:
    """Return a NATS message as a queue's message; None if it is not one, since any client may write to an inbox."""
    return delivery(message.subject, message.data, message.reply)


def delivery(subject: str, data: bytes, ack_subject: str) -> QueuedMessage | None:
    """Return a delivery that is acknowledged on a subject, which tells everything about it; None if it is not one."""
    # As `Msg.metadata` of nats-py does, without its date and its four objects.
    tokens = ack_subject.split(".")
    if tokens[:2] != _ACK_PREFIX or len(tokens) < _NUM_TOKENS:
        return None
    if len(tokens) > _NUM_TOKENS:
        if len(tokens) < _NUM_TOKENS_WITH_DOMAIN:
            return None
        del tokens[2:4]  # domain and account
    _, _, _, _, num_delivered, stream_seq, _, stored_ns, num_pending = tokens[:_NUM_TOKENS]
    try:
        numbers = int(stream_seq), int(num_delivered), int(num_pending), int(stored_ns) / 1e9
    except (ValueError, OverflowError):
        return None
    return QueuedMessage(subject, data, ack_subject, *numbers)


def send_ack(nats: DirectClient, message: QueuedMessage, ack: bytes) -> None:
    """Answer a delivery with one of the constants above; when that fails, the queue delivers the message again."""
    try:
        nats.send(message.ack_subject, ack)
    except SEND_ERRORS as error:
        _log.warning("acknowledgement not sent", extra={"ack": ack.decode(), "error": repr(error)})


_PATH = re.compile(r"at `(?:key` in `)?\$\.(\w+)(?:\.(\w+))?")


class RequestEnvelope(Struct, frozen=True):
    """The fields that are needed to answer. An epoch that is not one counts as 0: its request is answered too."""

    id: RequestId
    epoch: Any = 0
    reply: ReplySubject | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.epoch, int) or not 0 <= self.epoch <= MAX_EPOCH:
            msgspec.structs.force_setattr(self, "epoch", 0)


class UnreadableRequestError(Exception):
    """A payload is not a request.

    Attributes:
        envelope: Where to send the error; None when that cannot be read either.
        param: Field at fault.
    """

    def __init__(self, error: Exception, envelope: RequestEnvelope | None) -> None:
        super().__init__(str(error)[:500] or type(error).__name__)
        self.envelope = envelope
        if isinstance(error, UnknownFieldError):
            self.param = error.param
            return
        path = _PATH.search(str(error))
        self.param = (path[2] if path and path[1] == "sampling" and path[2] else path[1]) if path else "request"


def read_request(payload: bytes) -> Request:
    """Decode a request; `UnreadableRequestError` if the payload is not one, whatever is wrong with it."""
    try:
        return decode_request(payload)
    except UNDECODABLE as error:
        raise UnreadableRequestError(error, _envelope(payload)) from None


def _envelope(payload: bytes) -> RequestEnvelope | None:
    decoder: Any = msgspec.json if payload[:1] == b"{" else msgspec.msgpack
    try:
        envelope: RequestEnvelope = decoder.decode(payload, type=RequestEnvelope)
    except UNDECODABLE:
        return None
    return envelope
