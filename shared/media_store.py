"""The images of requests by their digest, in a JetStream stream: a request names them, and its worker reads them here.

An image lies in pieces under `hr.media.<tenant>.<digest>.<piece>`, so a worker that reads for a tenant finds what that
tenant has stored and nothing else. It expires by itself. A full store refuses new images, and no image that is wanted
makes room for another; the process that stores for a tenant bounds the tenant's bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from shared.errors import HeadraceError
from shared.media import MediaRef
from shared.streams import MEDIA_STREAM
from shared.subjects import media_filter, media_subject

PIECE_BYTES = 512 << 10
UNIT_BYTES = 64 << 10
"""Of a tenant's share: an image counts as its bytes, rounded up. All names of a share are listed for each image."""
INTERACTIVE_TTL_S = 3600.0
"""Longer than a request of a person may wait and run."""
BATCH_TTL_S = 86_400.0 + INTERACTIVE_TTL_S
"""Longer than the window of a batch."""
LINE_TTL_S = BATCH_TTL_S / 4
"""Of lines of a batch, whose gateway publishes a line again when a worker does not find its image."""
_CONCURRENT_PIECES = 8
_MAX_KNOWN = 65_536
_PIECE_UNITS = PIECE_BYTES // UNIT_BYTES
_LONG = "long"
# Names the empty message that tells an image's units; what ends so is not counted as a piece by earlier gateways.
_UNITS = "-long"
_STREAM_FULL = frozenset({10077})

_log = logging.getLogger(__name__)


class MediaStoreError(HeadraceError):
    """Images cannot be stored or read at the moment."""


class MediaFullError(MediaStoreError):
    """The store has no room or, if `is_own`, the tenant's share of it is used up; the message says which."""

    def __init__(self, message: str, *, is_own: bool) -> None:
        super().__init__(message)
        self.is_own = is_own


class MissingMediaError(HeadraceError):
    """An image is not stored, or the bytes stored under its digest do not match it."""


class MediaStore:
    """Reads and writes images. Remembers what it has stored lately, so that a conversation's images are stored once."""

    def __init__(
        self, js: JetStreamContext, tenant_bytes: int = 0, num_reconnects: Callable[[], int] = lambda: 0
    ) -> None:
        """Let each tenant store up to `tenant_bytes`, each image rounded up to `UNIT_BYTES`; 0 sets no bound.

        Whenever `num_reconnects` returns another number, NATS may have lost stored images.
        """
        self._js = js
        self._tenant_units = tenant_bytes // UNIT_BYTES
        self._num_reconnects = num_reconnects
        self._seen_reconnects = num_reconnects()
        # The stream's creation and its last sequence, when it was asked last.
        self._stream: tuple[object, int] = (None, 0)
        # When stored images expire, in monotonic seconds, by tenant and digest; 0 if it is in doubt.
        self._known: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        # The subjects of pieces that are being stored, by tenant.
        self._storing: list[tuple[str, frozenset[str]]] = []
        self._asking = asyncio.Lock()
        self._calls = asyncio.Semaphore(_CONCURRENT_PIECES)

    def forget(self, tenant: str, digest: bytes) -> None:
        """Store an image again when it comes next: a worker did not find it."""
        self._known[tenant, digest] = 0.0

    async def put(self, tenant: str, data: bytes, ttl_s: float = INTERACTIVE_TTL_S) -> bytes:
        """Store an image for half of `ttl_s` or longer, and return its digest.

        Raises `MediaFullError` if there is no room for it, another `MediaStoreError` if it cannot be stored now.
        """
        digest = hashlib.sha256(data).digest() if len(data) < PIECE_BYTES else await asyncio.to_thread(_digest, data)
        if (reconnects := self._num_reconnects()) != self._seen_reconnects:
            self._seen_reconnects = reconnects
            self._known.clear()
        key, now = (tenant, digest), time.monotonic()
        if self._known.get(key, 0.0) - now > ttl_s / 2:
            self._known.move_to_end(key)
            return digest
        try:
            await self._store(tenant, digest, data, ttl_s)
        except (NotFoundError, NoStreamResponseError) as error:
            raise MediaStoreError(f"the stream {MEDIA_STREAM} does not exist; run `headrace setup`") from error
        except APIError as error:
            if error.err_code in _STREAM_FULL:
                raise MediaFullError("The server's store of images is full. Try again later.", is_own=False) from error
            raise MediaStoreError(f"the store of images refuses an image: {error}") from error
        except (NatsError, OSError) as error:
            raise MediaStoreError(f"the store of images does not answer: {error!r}") from error
        self._known[key] = now + ttl_s
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return digest

    async def get(self, tenant: str, ref: MediaRef) -> bytes:
        """Return the bytes of an image; `MissingMediaError` without them, `MediaStoreError` if NATS does not answer."""
        num_pieces = -(-ref.num_bytes // PIECE_BYTES)
        try:
            pieces = await asyncio.gather(
                *(self._get(media_subject(tenant, ref.digest, number)) for number in range(num_pieces))
            )
        except NotFoundError as error:
            message = "An image of this request is no longer stored: it has expired. Send the request again."
            raise MissingMediaError(message) from error
        except (NatsError, OSError) as error:
            raise MediaStoreError(f"the store of images does not answer: {error!r}") from error
        data = b"".join(pieces)
        if len(data) != ref.num_bytes or await asyncio.to_thread(_digest, data) != ref.digest:
            raise MissingMediaError("A stored image of this request has another length or digest.")
        return data

    async def _store(self, tenant: str, digest: bytes, data: bytes, ttl_s: float) -> None:
        num_pieces = -(-len(data) // PIECE_BYTES)
        pieces = {
            media_subject(tenant, digest, n): data[n * PIECE_BYTES : (n + 1) * PIECE_BYTES] for n in range(num_pieces)
        }
        units = -(-len(data) // UNIT_BYTES)
        if units < num_pieces * _PIECE_UNITS:
            pieces[media_subject(tenant, digest, f"{units}{_UNITS}")] = b""
        # The subject of an empty message that is there while an image of a job stays for `INTERACTIVE_TTL_S` or more.
        mark = media_subject(tenant, digest, _LONG)
        storing = (tenant, frozenset(pieces))
        async with self._asking:
            # Another process may have stored it, for longer.
            stored = await self._take_share(tenant, digest, storing[1])
            self._storing.append(storing)
        try:
            if mark in stored and stored.issuperset(pieces) and (tenant, digest) not in self._known:
                return
            is_long = ttl_s > LINE_TTL_S or mark in stored
            if ttl_s > LINE_TTL_S:
                # Before the pieces, so that a process that stores them for a shorter time sees it now or afterwards.
                await self._put(mark, b"", ttl_s - INTERACTIVE_TTL_S)
            await self._put_all(pieces, max(ttl_s, BATCH_TTL_S) if is_long else ttl_s)
            if not is_long and mark in await self._stored(media_subject(tenant, digest, "*")):
                await self._put_all(pieces, BATCH_TTL_S)
        finally:
            self._storing.remove(storing)

    async def _put_all(self, pieces: dict[str, bytes], ttl_s: float) -> None:
        await asyncio.gather(*(self._put(subject, piece, ttl_s) for subject, piece in pieces.items()))

    async def _put(self, subject: str, piece: bytes, ttl_s: float) -> None:
        async with self._calls:
            await self._js.publish(subject, piece, msg_ttl=ttl_s)

    async def _get(self, subject: str) -> bytes:
        async with self._calls:
            return (await self._js.get_last_msg(MEDIA_STREAM, subject)).data or b""

    async def _stored(self, subjects: str) -> frozenset[str]:
        return frozenset((await self._info(subjects)).state.subjects or {})

    async def _info(self, subjects: str) -> StreamInfo:
        """Ask for the stream's state; forget images stored in an earlier stream."""
        info = await self._js.stream_info(MEDIA_STREAM, subjects_filter=subjects)
        created, last_seq = self._stream
        if (created is not None and info.created != created) or info.state.last_seq < last_seq:
            self._known.clear()
        self._stream = (info.created, info.state.last_seq)
        return info

    async def _take_share(self, tenant: str, digest: bytes, pieces: frozenset[str]) -> frozenset[str]:
        """Return a tenant's stored subjects, at least those of an image, if its share has room for the missing pieces.

        Dynamic thresholds, as `gateway.shares`: a tenant holds at most as much as is free for all.
        """
        if not self._tenant_units:
            return await self._stored(media_subject(tenant, digest, "*"))
        info = await self._info(media_filter(tenant))
        stored = frozenset(info.state.subjects or {})
        names = stored.union(*(subjects for owner, subjects in self._storing if owner == tenant))
        held = _num_units(names)
        if (wanted := _num_units(names | pieces) - held) <= 0:
            return stored
        is_own_full = held + wanted > self._tenant_units
        if (limit := info.config.max_bytes or 0) > 0:
            begun = sum(_num_units(subjects) for _, subjects in self._storing)
            free = (limit - info.state.bytes) // UNIT_BYTES - begun - wanted
            is_own_full |= bool(held) and held + wanted > free
        if is_own_full:
            kb = UNIT_BYTES >> 10
            message = (
                f"The images of this tenant fill its share of the store: {held * kb} KB of at most "
                f"{self._tenant_units * kb} (each rounded up to {kb}), and no more than are free for all. They expire "
                f"within {INTERACTIVE_TTL_S / 3600:g} h, those of batches within {LINE_TTL_S / 3600:g} h, of jobs and "
                f"background responses within {BATCH_TTL_S / 3600:g} h; or ask the "
                "operator for more (--media-tenant-bytes)."
            )
            raise MediaFullError(message, is_own=True)
        return stored


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _num_units(subjects: Iterable[str]) -> int:
    """Return the units that stored images take; of an earlier gateway, which tells none, those of whole pieces."""
    pieces, told = dict[str, int](), dict[str, int]()
    for subject in subjects:
        image, _, name = subject.rpartition(".")
        if name.endswith(_UNITS):
            told[image] = int(name.removesuffix(_UNITS))
        elif name != _LONG:
            pieces[image] = pieces.get(image, 0) + 1
    return sum(told.get(image, count * _PIECE_UNITS) for image, count in pieces.items())
