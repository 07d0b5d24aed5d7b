"""Dead letters: requests that were taken out of the queues because running them again would do harm or is of no use.

A gateway or a worker writes one with `publish_dead_letter` when it quarantines a request; the client or the results
stream also gets an error, from the process that held the request. An operator reads, retries and drops them: `headrace
dead`. They lie in the stream `HR_DEAD` under `hr.dead.<model>.<lane>.<tenant>`; the newest stay when a subject or the
stream is full. A letter has at most `MAX_LETTER_BYTES`, so the newest of one tenant, model and lane take at most an
eighth of the stream, and one tenant does not push out the letters of another.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NoStreamResponseError

from shared.errors import DependencyError
from shared.messages import PROTOCOL_VERSION, Request, encode
from shared.subjects import dead_letter_subject

DeadReason = Literal["worker_lost", "attempts_exhausted"]

# A prompt that does not fit is not kept; its request has failed, and its publisher has it.
MAX_LETTER_BYTES = 64 << 10
# Room beside the payload for the subject and the headers of the publication.
_MARGIN_BYTES = 1024
_MAX_ERROR_LENGTH = 2000
_MAX_ATTEMPT_ERROR_LENGTH = 256
_MAX_ATTEMPTS = 64
_PUBLISH_TIMEOUT_S = 5.0


class DeadAttempt(Struct, frozen=True, array_like=True):
    """One attempt that failed: the worker that held the request, empty if none did, when it was given up, and why."""

    worker: str
    epoch: int
    time: float
    error: str = ""


class DeadLetter(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="dead_letter"):
    """A request in quarantine.

    Attributes:
        request: As it would have been sent again: `emitted` holds what the client has received already.
        reason: `worker_lost`: workers died or hung while they ran it. `attempts_exhausted`: given up after too many
            attempts for other causes.
        error: Message that the client received.
        attempts: The failed attempts, oldest first.
        quarantined_by: Gateway or worker that wrote this.
        quarantined: Unix seconds.
        is_whole: False when the prompt was too large to be kept beside the rest; such a request cannot be retried.
    """

    request: Request
    reason: DeadReason
    error: str
    quarantined_by: str
    quarantined: float
    attempts: tuple[DeadAttempt, ...] = ()
    is_whole: bool = True
    version: int = PROTOCOL_VERSION


async def publish_dead_letter(nats: Client, letter: DeadLetter) -> int:
    """Store a dead letter and return its number in the stream.

    Two publications of one attempt of one request are stored once. What an operator retries is a new request of the
    same id, which may be given up again at once: its time of creation tells it from the first.

    Raises:
        DependencyError: The stream is missing or does not answer.
    """
    request = letter.request
    subject = dead_letter_subject(request.model, request.lane, request.tenant)
    payload = fit_dead_letter(letter, min(nats.max_payload - _MARGIN_BYTES, MAX_LETTER_BYTES))
    headers = {"Nats-Msg-Id": f"{subject}/{request.id}/{request.epoch}/{request.created}"}
    try:
        ack = await nats.jetstream().publish(subject, payload, timeout=_PUBLISH_TIMEOUT_S, headers=headers)
    except NoStreamResponseError as error:
        raise DependencyError("the stream HR_DEAD does not exist; run `headrace setup`") from error
    except (APIError, NatsError, OSError) as error:
        raise DependencyError(f"the dead letter of request {request.id!r} could not be stored: {error!r}") from error
    return ack.seq


def fit_dead_letter(letter: DeadLetter, max_bytes: int) -> bytes:
    """Encode a letter within `max_bytes`: without emitted tokens when they do not fit, then without the prompt."""
    short = msgspec.structs.replace(
        letter,
        error=letter.error[:_MAX_ERROR_LENGTH],
        attempts=tuple(
            msgspec.structs.replace(attempt, error=attempt.error[:_MAX_ATTEMPT_ERROR_LENGTH])
            for attempt in letter.attempts[-_MAX_ATTEMPTS:]
        ),
    )
    payload = encode(short)
    if len(payload) > max_bytes:
        request = msgspec.structs.replace(short.request, emitted=())
        payload = encode(msgspec.structs.replace(short, request=request))
    if len(payload) > max_bytes:
        kept = ("id", "epoch", "model", "tenant", "lane", "created")
        request = Request(**{name: getattr(letter.request, name) for name in kept})
        payload = encode(msgspec.structs.replace(short, request=request, is_whole=False))
    return payload
