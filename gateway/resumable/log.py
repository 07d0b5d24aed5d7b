"""The log of resumable streams in JetStream: heads, requests, pieces of entries, idempotency keys, and fences.

It lies in memory, as the queue of interactive requests does, each tenant for itself. Messages have about 4 kB at most,
so the number of a tenant's messages bounds their bytes: once the stream is half full, its oldest beyond
`TENANT_MESSAGES` are dropped. A larger head is cut into chunks, each under the digest of its content, and its own
message names them. A stream that has lost a message is gone. Age and total size are bounds of the JetStream stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from gateway.admission.stored_reads import ReadSize
from gateway.errors import ApiError
from gateway.resumable.fences import Fences
from gateway.resumable.record import PIECE_BYTES, KeyRecord, StreamHead, decode_head, decode_key, digest_of, encode
from gateway.resumable.store import MessageStore
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.log_limit import LogLimit
from shared.nats_connection import SEND_ERRORS
from shared.streams import STREAMS_STREAM, StreamLimits, ensure_stream
from shared.subjects import decode_name, stream_subject, streams_filter
from shared.tenant_bounds import TenantBound

# A quarter of the stream: a tenant that keeps as much as it can leaves room for three others that do.
TENANT_MESSAGES = StreamLimits().streams_max_bytes // 4 // PIECE_BYTES
# A tenant may exceed its bound by this many messages for each gateway.
MESSAGES_BETWEEN_PURGES = 512
# A message that begins so names chunks by their digests. No msgpack has this byte.
_CHUNKS_MARK = b"\xc1"
_DIGEST_BYTES = 12
# Heads of a list that are asked for at once.
_HEADS_AHEAD = 4
# Pieces that are asked for at once: most streams have fewer. Twice as many each time, up to `_MAX_AHEAD`.
_PIECES_AHEAD = 2
_MAX_AHEAD = 16
# Chunks of a head that are asked for at once.
_CHUNKS_AHEAD = 16
# The part that a stream has besides once it has ended: no list reads its head any more.
_ENDED = "ended"
# Heads that one list reads.
MAX_LISTED = 1000
_TIMEOUT_S = 3.0
ERRORS: tuple[type[Exception], ...] = (APIError, DependencyError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """A head, and the number of its message: a replacement must name the last one."""

    head: StreamHead
    seq: int


class StreamLog:
    """Reads and writes the log. Keeps only how many messages of each tenant were written since the last purge.

    All methods raise one of `ERRORS` where NATS does not answer, unless they say otherwise.

    Attributes:
        fences: The fences and journals of writers.
        count: Counts messages that a tenant keeps more than before; now and then, its oldest ones are dropped.
    """

    def __init__(self, nats: DirectClient, limits: StreamLimits | None = None) -> None:
        self._nats = nats
        self._limits = limits or StreamLimits()
        self._js = nats.jetstream(timeout=_TIMEOUT_S)
        self._store = MessageStore(nats)
        self.fences = Fences(self._store, self._js)
        self._bound = TenantBound(
            self._js,
            STREAMS_STREAM,
            streams_filter,
            TENANT_MESSAGES,
            MESSAGES_BETWEEN_PURGES,
            when_half_full=True,
        )
        self._log_limit = LogLimit(_log)
        self.count = self._bound.count

    async def start(self) -> None:
        """Listen for answers; must be awaited before a fence is written."""
        await self._store.start()

    async def ensure(self) -> None:
        """Make the JetStream stream if it is missing; raise one of `ERRORS` if that fails."""
        await self._nats.unless_lost(ensure_stream(self._js, STREAMS_STREAM, self._limits))

    async def create(self, head: StreamHead, requests: Sequence[bytes], *, is_unused: bool = False) -> int:
        """Store a new stream, its head last, and return that one's number; `ApiError` 409 for a known id, or 503.

        With `is_unused`, no stream can have its id.
        """
        with answering():
            try:
                stored = await self._create(head, requests, is_unused)
            except NoStreamResponseError:
                # The first stream since NATS has started.
                await self.ensure()
                stored = await self._create(head, requests, is_unused)
        if stored is None:
            message = (
                f"There is a resumable stream '{head.id[:128]}' already. Send another 'x-request-id', or none, and the "
                "gateway chooses one."
            )
            raise ApiError(409, message, param="x-request-id", code="stream_exists")
        self.count(head.tenant, len(requests) + 2)
        return stored

    async def find(self, tenant: str, stream_id: str) -> Stored | None:
        """Return the head of a stream, or None if there is none."""
        found = await self._whole(stream_subject(tenant, stream_id, "head"))
        if found is None:
            return None
        try:
            head = decode_head(found[0])
        except msgspec.MsgspecError as error:
            self._log_limit.warning(tenant, "the head of a stream cannot be read: %s", error)
            return None
        return Stored(head, found[1]) if (head.tenant, head.id) == (tenant, stream_id) else None

    async def replace(self, head: StreamHead, seq: int) -> int | None:
        """Store a head if its last message is `seq`; return the new number, or None if another was faster."""
        # Streams end several at a time: after a round.
        self.write_at_end_of_turn()
        stored = await self._publish_head(head, seq)
        if stored is not None and head.ended is not None:
            # Without it a list reads the head, which says so too.
            with contextlib.suppress(*SEND_ERRORS):
                self.write_at_end_of_turn()
                self.send(head.tenant, head.id, _ENDED, payload=b"")
                self.count(head.tenant, 1)
        return stored

    async def requests(self, head: StreamHead) -> list[bytes]:
        """Return the pieces of a stream's requests; raise `ApiError` 410 if some are no longer kept."""
        subjects = [stream_subject(head.tenant, head.id, "req", number) for number in range(head.num_request_pieces)]
        found = await asyncio.gather(*map(self._last, subjects))
        present = [each[0] for each in found if each is not None]
        if len(present) < len(found):
            raise no_longer_kept(head.id, "its requests are gone")
        # Two that begin at once by the same id write to the same subjects, and one of them gets the head.
        if head.requests_digest not in (None, digest_of(present)):
            raise no_longer_kept(head.id, "another request of the same id has overwritten its own")
        return present

    async def pieces(self, head: StreamHead, first: int) -> list[bytes]:
        """Return the messages with pieces of a stream from number `first` on, as far as they are there.

        Several are asked for at once. They are read one by one: one that is read early may lack entries that are before
        those of the next.
        """
        pieces: list[bytes] = []
        num_ahead = _PIECES_AHEAD
        while True:
            numbers = range(first + len(pieces), first + len(pieces) + num_ahead)
            subjects = [stream_subject(head.tenant, head.id, head.owner, number) for number in numbers]
            for found in await asyncio.gather(*map(self._last, subjects)):
                if found is None:
                    return pieces
                pieces.append(found[0])
            num_ahead = min(2 * num_ahead, _MAX_AHEAD)

    def send(self, tenant: str, stream_id: str, *place: str | int, payload: bytes) -> None:
        """Write a part of a stream without waiting; a later message that is acknowledged says that it is stored."""
        self._nats.send(stream_subject(tenant, stream_id, *place), payload)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Write all messages sent in the block with one system call."""
        return self._nats.together()

    def write_at_end_of_turn(self) -> None:
        """Write all messages of this turn of the event loop with one system call, which costs more than a message."""
        self._nats.write_at_end_of_turn()

    async def heads(self, tenant: str, size: ReadSize) -> tuple[list[StreamHead], bool]:
        """Return the heads of a tenant's streams that have not ended, and whether there are more than `MAX_LISTED`.

        Names and heads count in `size`.
        """
        places = await self.running(tenant, size)
        heads: list[StreamHead] = []
        for start in range(0, min(len(places), MAX_LISTED), _HEADS_AHEAD):
            several = places[start : min(start + _HEADS_AHEAD, MAX_LISTED)]
            size.num_records += len(several)
            found = await asyncio.gather(*(self.find(*place) for place in several))
            heads += [each.head for each in found if each is not None]
        return heads, len(places) > MAX_LISTED

    async def running(self, tenant: str | None = None, size: ReadSize | None = None) -> list[tuple[str, str]]:
        """Return tenants and ids of the streams that have not ended, of one tenant or of all; count names in `size`."""
        try:
            ended = {subject.removesuffix(_ENDED) for subject in await self._subjects(tenant, _ENDED)}
            heads = await self._subjects(tenant, "head")
        except NotFoundError:
            return []
        if size is not None:
            size.num_names += len(ended) + len(heads)
        places = [subject.split(".")[2:4] for subject in heads if subject.removesuffix("head") not in ended]
        return [(decode_name(tenant), decode_name(stream_id)) for tenant, stream_id in places]

    async def _subjects(self, tenant: str | None, part: str) -> dict[str, int]:
        info = await self._js.stream_info(STREAMS_STREAM, subjects_filter=streams_filter(tenant, f"*.{part}"))
        return info.state.subjects or {}

    async def delete(self, head: StreamHead) -> None:
        """Forget a stream, and the idempotency key that stands for it."""
        await self._purge(stream_subject(head.tenant, head.id, ">"))
        if head.key_digest is not None:
            await self.release_key(head.tenant, head.key_digest, head.key_seq)

    async def withdraw(self, head: StreamHead) -> bool:
        """Forget a stream that could not be created in time; False while NATS has no head by its id."""
        found = await self.find(head.tenant, head.id)
        if found is not None and found.head == head:
            # Whatever has begun by this id since stays.
            await self._purge(stream_subject(head.tenant, head.id, ">"), found.seq)
        return found is not None

    async def delete_pieces(self, head: StreamHead) -> None:
        """Forget the pieces of a stream that its owner has written."""
        await self._purge(stream_subject(head.tenant, head.id, head.owner, "*"))

    async def find_key(self, tenant: str, digest: str) -> tuple[KeyRecord, int] | None:
        """Return the record of an idempotency key, and the number of its message."""
        found = await self._last(stream_subject(tenant, digest, "key"))
        return None if found is None else (decode_key(found[0]), found[1])

    async def claim_key(self, tenant: str, digest: str, record: KeyRecord, seq: int) -> int | None:
        """Let an idempotency key stand for a stream if its last message is `seq`.

        Return the number of the message, None if another was faster.
        """
        subject = stream_subject(tenant, digest, "key")
        try:
            return await self._publish(subject, encode(record), seq)
        except NoStreamResponseError:
            await self.ensure()
            return await self._publish(subject, encode(record), seq)

    async def release_key(self, tenant: str, digest: str, seq: int) -> None:
        """Release an idempotency key up to message `seq`; a later claim stays. 0 releases any."""
        await self._purge(stream_subject(tenant, digest, "key"), seq)

    async def close(self) -> None:
        """Wait for purges under way."""
        await self.fences.close()
        await self._store.close()
        await self._bound.close()

    async def _create(self, head: StreamHead, requests: Sequence[bytes], is_unused: bool) -> int | None:
        if not is_unused and await self._last(stream_subject(head.tenant, head.id, "head")) is not None:
            # Who takes that stream over is to find its own requests.
            return None
        for number, piece in enumerate(requests):
            self.send(head.tenant, head.id, "req", number, payload=piece)
        return await self._publish_head(head, 0)

    async def _publish_head(self, head: StreamHead, seq: int) -> int | None:
        subject = stream_subject(head.tenant, head.id, "head")
        return await self._publish(subject, self._in_chunks(head.tenant, subject, encode(head)), seq)

    async def _publish(self, subject: str, payload: bytes, seq: int) -> int | None:
        await self._store.start()
        return await self._store.write(subject, payload, seq)

    def _in_chunks(self, tenant: str, subject: str, payload: bytes) -> bytes:
        """Return a payload, or if it is large, send its chunks and return their manifest.

        A head that changes keeps the chunks before the change.
        """
        if len(payload) <= PIECE_BYTES:
            return payload
        chunks = [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]
        digests = [hashlib.blake2b(chunk, digest_size=_DIGEST_BYTES).digest() for chunk in chunks]
        for digest, chunk in zip(digests, chunks, strict=True):
            self._nats.send(f"{subject}.{digest.hex()}", chunk)
        self.count(tenant, len(chunks))
        return _CHUNKS_MARK + b"".join(digests)

    async def _whole(self, subject: str) -> tuple[bytes, int] | None:
        """Return a message with its chunks; None if one of them is gone."""
        found = await self._last(subject)
        if found is None or not found[0].startswith(_CHUNKS_MARK):
            return found
        names, seq = found[0][1:].hex(), found[1]
        width = 2 * _DIGEST_BYTES
        subjects = [f"{subject}.{names[start : start + width]}" for start in range(0, len(names), width)]
        chunks: list[bytes] = []
        for start in range(0, len(subjects), _CHUNKS_AHEAD):
            several = await asyncio.gather(*map(self._last, subjects[start : start + _CHUNKS_AHEAD]))
            chunks += [chunk[0] for chunk in several if chunk is not None]
            if len(chunks) < min(len(subjects), start + _CHUNKS_AHEAD):
                return None
        return b"".join(chunks), seq

    async def _purge(self, subject: str, last_seq: int = 0) -> None:
        """Drop the messages of a subject, up to `last_seq` if given."""
        await self._js.purge_stream(STREAMS_STREAM, subject=subject, seq=last_seq + 1 if last_seq else None)

    async def _last(self, subject: str) -> tuple[bytes, int] | None:
        found = await self._store.last(subject)
        return None if found is None else (found.data, found.seq)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Turn errors of NATS into an `ApiError` 503."""
    try:
        yield
    except ERRORS as error:
        raise unavailable() from error


def unavailable() -> ApiError:
    """Return the error of a log that cannot be read or written now."""
    message = "The log of resumable streams does not answer at the moment. Try again shortly."
    return ApiError(503, message, code="stream_log_unavailable", retry_after_s=2.0)


def no_longer_kept(stream_id: str, why: str) -> ApiError:
    """Return the error of a stream of which a part is gone; `why` says which, or why."""
    message = (
        f"The stream '{stream_id[:128]}' is no longer kept: {why}. Streams are dropped after their time, when they are "
        "too large, and when their tenant keeps too much. Ask again."
    )
    return ApiError(410, message, param="id", code="stream_expired")


def stopped() -> ApiError:
    """Return the error that ends a stream whose client deletes it."""
    return ApiError(409, "The generation was stopped by a request to delete the stream.", code="stream_stopped")


def not_found(stream_id: str) -> ApiError:
    """Return the error of a stream that there is not, or that belongs to another tenant."""
    return ApiError(404, f"Stream with id '{stream_id[:128]}' not found.", param="id", code="stream_not_found")
