"""Logged generations, as `GenerationService` uses them: they continue without their client and can be replayed.

A client asks for one with `stream_options.resumable`, or with an `Idempotency-Key`, which lets a repeated request have
the same answer. `gateway.resumable` keeps them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from gateway.admission.auth import Principal
from gateway.admission.limits import Lease
from gateway.api.answer import Answer, Asked, ResponseHead
from gateway.api.endpoint import GenerationStart
from gateway.api.generation_starter import Membership
from gateway.errors import ApiError
from gateway.http1.exchange import Exchange

KEY_HEADER = b"idempotency-key"
MAX_KEY_CHARACTERS = 255


class IdempotencyKey(Struct, frozen=True):
    """What repeated requests have in common. Both digests are of the endpoint too.

    Attributes:
        digest: Of the key, of 40 digits.
        request_digest: Of the body.
    """

    digest: str
    request_digest: str


def idempotency_key(headers: Iterable[tuple[bytes, bytes]], endpoint: str, body: bytes) -> IdempotencyKey | None:
    """Return the key of a request, or None if it has none.

    Raises:
        ApiError: 400; there are several, or it is empty, too long, or not of visible ASCII characters.
    """
    values = [value for name, value in headers if name == KEY_HEADER]
    if not values:
        return None
    value = values[0].strip()
    is_visible = all(0x21 <= byte < 0x7F for byte in value)
    if len(values) > 1 or not 1 <= len(value) <= MAX_KEY_CHARACTERS or not is_visible:
        message = f"'Idempotency-Key' must be one value of 1 to {MAX_KEY_CHARACTERS} visible ASCII characters."
        raise ApiError(400, message, param="Idempotency-Key", code="invalid_value")
    digests = (hashlib.sha256(endpoint.encode() + b"\0" + each).hexdigest() for each in (value, body))
    return IdempotencyKey(next(digests)[:40], next(digests))


class LoggedGeneration(Protocol):
    """A generation that this process can show."""

    @property
    def request_id(self) -> str:
        """Its name: the `x-request-id` of its first answer."""
        ...

    def asked(self, exchange: Exchange, head: ResponseHead, principal: Principal) -> Asked:
        """Return what an answer of it is made of."""
        ...

    async def join(self, answer: Answer) -> None:
        """Show the generation from its beginning.

        Raises:
            ApiError: It cannot be shown, or not from there.
        """
        ...


class RepeatedError(Exception):
    """A request is not begun, because its key stands for another generation."""

    def __init__(self, generation: LoggedGeneration) -> None:
        super().__init__(generation.request_id)
        self.generation = generation


class GenerationLog(Protocol):
    """Keeps logged generations."""

    def leave(self, stream: LoggedGeneration, answer: Answer) -> None:
        """Show a generation to an answer no more."""
        ...

    async def repeated(self, principal: Principal, key: IdempotencyKey) -> LoggedGeneration | None:
        """Return the generation that a key stands for, or None if it is new.

        Raises:
            ApiError: 422, it stands for another request; 503, the log does not answer.
        """
        ...

    async def start_logged(
        self, endpoint: str, asked: GenerationStart, stamped: Asked, lease: Lease, key: IdempotencyKey | None
    ) -> Membership:
        """Let a generation begin, which `asked.answer` shows; the lease is released when it has ended.

        Raises:
            ApiError: It was not admitted, or cannot be logged.
            RepeatedError: Another request with the same key was faster.
        """
        ...
