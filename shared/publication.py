"""Publications to JetStream on a condition, what NATS answers to them, and reading of the messages of a subject.

Where NATS refuses or does not answer, all raise its errors (`shared.nats_connection.SEND_ERRORS`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST_SEQUENCE = 10071


class PublishError(msgspec.Struct):
    """Why a message was not stored."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class PublishAck(msgspec.Struct):
    """The sequence of a stored message, or the error."""

    seq: int = 0
    error: PublishError | None = None


decode_ack = msgspec.json.Decoder(PublishAck).decode


async def publish_expecting(
    js: JetStreamContext, subject: str, payload: bytes, seq: int, headers: dict[str, str] | None = None
) -> int | None:
    """Store a message if the last one of its subject is `seq`, 0 for none; return its sequence, None if not stored."""
    try:
        return (await js.publish(subject, payload, headers={EXPECTED_SEQUENCE: str(seq), **(headers or {})})).seq
    except APIError as error:
        if error.err_code != WRONG_LAST_SEQUENCE:
            raise
        return None


async def last_message(js: JetStreamContext, stream: str, subject: str) -> RawStreamMsg | None:
    """Return the last message of a subject, None if there is none. The stream's leader answers; raises as above."""
    try:
        return await js.get_last_msg(stream, subject)
    except NotFoundError:
        return None


async def messages_after(
    js: JetStreamContext, stream: str, subject: str, seq: int = 0
) -> AsyncIterator[tuple[int, RawStreamMsg]]:
    """Yield the messages of a subject behind the sequence `seq`, oldest first, each with its own; raises as above."""
    while True:
        try:
            message = await js.get_msg(stream, seq=seq + 1, subject=subject, next=True)
        except NotFoundError:
            return
        assert message.seq is not None
        seq = message.seq
        yield seq, message
