"""The images of requests by their digest, in a JetStream stream: a request names them, and its worker reads them here.

An image lies in pieces under `hr.media.<tenant>.<digest>.<piece>`, so a worker that reads for a tenant finds what that
tenant has stored and nothing else. It expires by itself. A full store refuses new images, and no image that is wanted
makes room for another; what a tenant may store is bounded by whoever stores for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from shared.errors import HeadraceError
from shared.media import MediaRef
from shared.streams import MEDIA_STREAM
from shared.subjects import media_filter, media_subject

PIECE_BYTES = 512 << 10
INTERACTIVE_TTL_S = 3600.0
"""Longer than a request of a person may wait and run."""
BATCH_TTL_S = 86_400.0 + INTERACTIVE_TTL_S
"""Longer than the window of a batch."""
_CONCURRENT_PIECES = 8
_MAX_KNOWN = 65_536
# What is known of a tenant's share is asked anew after so long.
_SHARE_S = 5.0
_STREAM_FULL = frozenset({10077})

_log = logging.getLogger(__name__)


class MediaStoreError(HeadraceError):
    """Images cannot be stored or read at the moment."""


class MediaFullError(MediaStoreError):
    """The store has no room, or the tenant's share of it is used up; the message says which.

    Attributes:
        is_own: It is the tenant's share.
    """

    def __init__(self, message: str, *, is_own: bool) -> None:
        """Say what is full."""
        super().__init__(message)
        self.is_own = is_own


class MissingMediaError(HeadraceError):
    """An image is not stored, or what is stored under its digest is something else."""


class MediaStore:
    """Reads and writes images. Remembers what it has stored lately, so that a conversation's images are stored once."""

    def __init__(self, js: JetStreamContext, tenant_bytes: int = 0) -> None:
        """Let each tenant store up to `tenant_bytes`, each image rounded up to pieces; 0 sets no bound."""
        self._js = js
        self._tenant_pieces = tenant_bytes // PIECE_BYTES
        # When what was stored expires, in monotonic seconds, by tenant and digest.
        self._known: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._shares: dict[str, tuple[float, int]] = {}
        self._calls = asyncio.Semaphore(_CONCURRENT_PIECES)

    async def put(self, tenant: str, data: bytes, ttl_s: float = INTERACTIVE_TTL_S) -> bytes:
        """Store an image for at least half of `ttl_s`; return its digest.

        Raises:
            MediaFullError: There is no room for it.
            MediaStoreError: It cannot be stored at the moment.
        """
        digest = hashlib.sha256(data).digest() if len(data) < PIECE_BYTES else await asyncio.to_thread(_digest, data)
        key, now = (tenant, digest), time.monotonic()
        if self._known.get(key, 0.0) - now > ttl_s / 2:
            self._known.move_to_end(key)
            return digest
        num_pieces = -(-len(data) // PIECE_BYTES)
        try:
            await self._take_share(tenant, num_pieces)
            pieces = (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
            await asyncio.gather(
                *(self._put(media_subject(tenant, digest, n), piece, ttl_s) for n, piece in enumerate(pieces))
            )
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
        """Return the bytes of an image.

        Raises:
            MissingMediaError: It is not there, or is not what its reference says.
            MediaStoreError: It cannot be read at the moment.
        """
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
            raise MissingMediaError("What is stored of an image of this request has another length or digest.")
        return data

    async def _put(self, subject: str, piece: bytes, ttl_s: float) -> None:
        async with self._calls:
            await self._js.publish(subject, piece, msg_ttl=ttl_s)

    async def _get(self, subject: str) -> bytes:
        async with self._calls:
            return (await self._js.get_last_msg(MEDIA_STREAM, subject)).data or b""

    async def _take_share(self, tenant: str, num_pieces: int) -> None:
        """Count pieces to a tenant's share.

        Raises:
            MediaFullError: The tenant has stored too much.
        """
        if not self._tenant_pieces:
            return
        asked_at, used = self._shares.get(tenant, (0.0, 0))
        if time.monotonic() - asked_at > _SHARE_S:
            info = await self._js.stream_info(MEDIA_STREAM, subjects_filter=media_filter(tenant))
            asked_at, used = time.monotonic(), len(info.state.subjects or {})
        if used + num_pieces > self._tenant_pieces:
            megabytes = self._tenant_pieces * PIECE_BYTES >> 20
            message = (
                f"The images of this tenant fill its share of the store, {megabytes} MB in pieces of "
                f"{PIECE_BYTES >> 10} KB. They expire within {INTERACTIVE_TTL_S / 3600:g} h, those of batches within "
                f"{BATCH_TTL_S / 3600:g} h; or ask the operator for more (--media-tenant-bytes)."
            )
            raise MediaFullError(message, is_own=True)
        self._shares[tenant] = (asked_at, used + num_pieces)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
