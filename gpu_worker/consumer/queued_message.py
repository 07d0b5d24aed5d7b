"""A message taken from a queue, and the acknowledgements of JetStream by which its delivery is answered."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from nats.aio.msg import Msg
from nats.errors import NotJSMessageError

from shared.direct_client import DirectClient
from shared.nats_connection import SEND_ERRORS

ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
REDELIVER = b"-NAK"
REDELIVER_SOON = b'-NAK {"delay": 100000000}'
REDELIVER_LATER = b'-NAK {"delay": 10000000000}'
DISCARD = b"+TERM"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """One delivery of a message in a JetStream work queue.

    Attributes:
        ack_subject: Subject for acknowledgements of this delivery.
        stream_seq: Names the message in its stream, over all deliveries.
        num_delivered: Which delivery this is, from 1.
        num_pending: Messages that waited in the queue behind it.
    """

    subject: str
    data: bytes
    ack_subject: str
    stream_seq: int
    num_delivered: int
    num_pending: int


def queued_message(message: Msg) -> QueuedMessage | None:
    """Return a NATS message as a queue's message, or None when it is not one (anybody may write to an inbox)."""
    try:
        metadata = message.metadata
    except (NotJSMessageError, ValueError):
        return None
    return QueuedMessage(
        message.subject,
        message.data,
        message.reply,
        metadata.sequence.stream,
        metadata.num_delivered,
        metadata.num_pending,
    )


def send_ack(nats: DirectClient, message: QueuedMessage, ack: bytes) -> None:
    """Answer a delivery with one of the constants above; when that fails, the queue delivers the message again."""
    try:
        nats.send(message.ack_subject, ack)
    except SEND_ERRORS as error:
        _log.warning("acknowledgement not sent", extra={"ack": ack.decode(), "error": repr(error)})
