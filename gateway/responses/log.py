"""The log of responses: durable, shared by all gateways, each tenant for itself, and bounded in age and size.

A record lies in the stream `HR_RESPONSES` in pieces of at most `PIECE_BYTES`. The first piece has their number and is
written last: a response is there once its first piece is. So a record may be larger than a message of NATS, and the
number of a tenant's pieces bounds their bytes. Beyond `TENANT_PIECES` the tenant's oldest pieces are dropped; age and
total size are bounds of the stream. A response that has lost a piece is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw, Struct
from nats.js.errors import APIError

from gateway.api.large_bodies import LargeBodies
from gateway.errors import ApiError
from gateway.responses.body import ItemBody
from gateway.responses.draft import ResponseDraft, Status
from gateway.responses.job import BackgroundJob
from shared.direct_client import DirectClient
from shared.errors import HeadraceError
from shared.log_limit import LogLimit
from shared.nats_connection import SEND_ERRORS
from shared.publication import last_message
from shared.streams import RESPONSES_STREAM, StreamLimits
from shared.subjects import response_subject, responses_filter
from shared.tenant_bounds import TenantBound


class ResponseRecord(Struct, frozen=True, array_like=True, tag="response_1"):
    """One response.

    Attributes:
        tenant: Whose it is; compared with who asks, besides being part of the subject.
        model: Which it was asked of; an alias, perhaps.
        draft: The response without its output, and the items of its request.
        response: JSON of the whole response; of one that is computed in the background, as it was at its begin.
        job: What computes it in the background.
        served: The model that computes it, if it was asked of an alias.
    """

    tenant: str
    model: str
    draft: ResponseDraft
    response: bytes
    job: BackgroundJob | None = None
    served: str | None = None


class _DraftInPieces(ResponseDraft, frozen=True, kw_only=True):
    input: list[Raw]  # type: ignore[assignment]


class _RecordInPieces(ResponseRecord, frozen=True, array_like=True, tag="response_1"):
    draft: _DraftInPieces


class _Output(Struct):
    status: Status
    output: list[ItemBody] = []


_decode_pieces = msgspec.msgpack.Decoder(_RecordInPieces).decode
_decode_item = msgspec.msgpack.Decoder(ItemBody).decode
_decode_output = msgspec.json.Decoder(_Output).decode


def decode_record(payload: bytes) -> ResponseRecord:
    """Read a record.

    Its items are decoded one by one: a decoder holds Python's lock until it is done, also in a thread.

    Raises:
        msgspec.MsgspecError: It is none, or of another version.
    """
    pieces = _decode_pieces(payload)
    fields = {name: getattr(pieces.draft, name) for name in ResponseDraft.__struct_fields__}
    draft = ResponseDraft(**fields | {"input": [_decode_item(item) for item in pieces.draft.input]})
    return ResponseRecord(pieces.tenant, pieces.model, draft, pieces.response, pieces.job, pieces.served)


def turn_of(record: ResponseRecord) -> list[ItemBody]:
    """Return what a response has added to its conversation: the items of its request, then those of its output."""
    return [*record.draft.input, *_decode_output(record.response).output]


def has_ended(record: ResponseRecord) -> bool:
    """Whether a response, as it is in the record, changes no more."""
    return _decode_output(record.response).status not in ("queued", "in_progress")


PIECE_BYTES = 16 << 10
# An eighth of the stream: a tenant that stores as much as it can leaves room for seven others that do.
TENANT_PIECES = StreamLimits().responses_max_bytes // 8 // PIECE_BYTES
# A tenant may exceed its bound by this many pieces for each gateway.
PIECES_BETWEEN_PURGES = 256
# Of one record, and of all that one request reads.
MAX_PIECES = 1024
# Of each tenant: one that reads long conversations delays no other.
CONCURRENT_CALLS = 32
_TIMEOUT_S = 3.0
_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class ResponseLogError(HeadraceError):
    """A record could not be written."""


class PieceBudget:
    """The pieces that one request may still read, so that a long conversation does not fill the gateway's memory.

    Attributes:
        num_bytes: Read so far; the last piece of a record counts as a whole one.
    """

    def __init__(self, num_pieces: int = MAX_PIECES) -> None:
        self._num_left = num_pieces
        self.num_bytes = 0

    def take(self, num_pieces: int) -> None:
        """Count pieces; `ApiError` 400 if they are too many."""
        self._num_left -= num_pieces
        self.num_bytes += num_pieces * PIECE_BYTES
        if self._num_left < 0:
            message = f"The conversation is larger than {MAX_PIECES * PIECE_BYTES >> 20} MB. Begin a new one."
            raise ApiError(400, message, param="previous_response_id", code="context_length_exceeded")


class _FirstPiece(msgspec.Struct, frozen=True, array_like=True):
    num_pieces: int
    data: bytes


class ResponseLog:
    """Reads and writes records. Keeps nothing but the count of pieces since the last purge, and whose calls run."""

    def __init__(self, nats: DirectClient, bodies: LargeBodies | None = None) -> None:
        """Work over an open connection; large records are decoded by `bodies`."""
        self._bodies = bodies or LargeBodies()
        self._js = nats.jetstream(timeout=_TIMEOUT_S)
        self._calls: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._bound = TenantBound(self._js, RESPONSES_STREAM, responses_filter, TENANT_PIECES, PIECES_BETWEEN_PURGES)
        self._log_limit = LogLimit(_log)

    async def put(self, record: ResponseRecord) -> None:
        """Store a response on the disk; raise `ResponseLogError` if it is too large or NATS does not take it."""
        payload = msgspec.msgpack.encode(record)
        pieces = [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]
        if len(pieces) > MAX_PIECES:
            raise ResponseLogError(f"a record of {len(payload)} bytes is larger than {MAX_PIECES * PIECE_BYTES}")
        first = msgspec.msgpack.encode(_FirstPiece(len(pieces), pieces[0]))
        tenant, response_id = record.tenant, record.draft.id
        try:
            # One after the other: the server writes each to the disk by itself, and many at once take longer.
            for number, piece in enumerate(pieces[1:], start=1):
                await self._js.publish(response_subject(tenant, response_id, number), piece)
            await self._js.publish(response_subject(tenant, response_id, 0), first)
        except _ERRORS as error:
            raise ResponseLogError(f"NATS does not store the response: {error!r}") from error
        self._bound.count(tenant, len(pieces))

    async def get(self, tenant: str, response_id: str, budget: PieceBudget | None = None) -> ResponseRecord | None:
        """Return a response of a tenant, or None if there is none; its pieces are taken from `budget`.

        Raises:
            ApiError: 503, NATS does not answer; 400, the budget does not suffice.
        """
        first = await self._piece(tenant, response_id, 0)
        if first is None:
            return None
        try:
            head = msgspec.msgpack.decode(first, type=_FirstPiece)
            if budget is not None:
                budget.take(head.num_pieces)
            rest = await asyncio.gather(
                *(self._piece(tenant, response_id, piece) for piece in range(1, head.num_pieces))
            )
            present = [piece for piece in rest if piece is not None]
            if len(present) < len(rest):
                return None
            payload = b"".join((head.data, *present))
            record = await self._bodies.read_kept(tenant, len(payload), partial(decode_record, payload))
        except msgspec.MsgspecError as error:
            self._log_limit.warning(tenant, "a response in the log cannot be read: %s", error)
            return None
        return record if (record.tenant, record.draft.id) == (tenant, response_id) else None

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response."""
        async with self._turns(tenant):
            await _answered(self._js.purge_stream(RESPONSES_STREAM, subject=response_subject(tenant, response_id)))

    async def close(self) -> None:
        """Wait for purges under way."""
        await self._bound.close()

    def _turns(self, tenant: str) -> asyncio.Semaphore:
        return self._calls.setdefault(tenant, asyncio.Semaphore(CONCURRENT_CALLS))

    async def _piece(self, tenant: str, response_id: str, number: int) -> bytes | None:
        async with self._turns(tenant):
            # The leader's own: what a gateway has just written, every other one finds.
            subject = response_subject(tenant, response_id, number)
            message = await _answered(last_message(self._js, RESPONSES_STREAM, subject))
        return None if message is None else message.data or b""


async def _answered(call: Awaitable[Result]) -> Result:
    try:
        return await call
    except _ERRORS as error:
        message = "The log of responses cannot be read at the moment. Try again shortly."
        raise ApiError(503, message, code="response_log_unavailable", retry_after_s=2.0) from error
