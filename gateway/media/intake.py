"""From the images that clients send to references: fetched or read, checked by their headers, stored by digest.

Nothing is decoded: a worker does that, and checks everything once more.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from gateway.errors import ApiError
from gateway.generation import Generation, ImageSource
from gateway.media.fetch import ImageFetcher
from gateway.shares import Shares, Turns
from shared.image_header import ImageProblemError, read_header
from shared.log_limit import LogLimit
from shared.media import MediaRef
from shared.media_store import BATCH_TTL_S, INTERACTIVE_TTL_S, MediaFullError, MediaStore, MediaStoreError

# Headers of larger images are read in a thread: some have a hundred thousand blocks.
_LARGE_BYTES = 64 << 10
_AT_ONCE = 8
MAX_HELD_BYTES = 256 << 20
"""Of images that are being stored; a tenant may hold as many as are free."""

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

ReadFile = Callable[[str, str, Callable[[int], None]], Awaitable[bytes | None]]
"""Takes a tenant and a file id; returns the file's bytes, or None if there is no such file.

Before it reads, it calls the function with the file's size in bytes, which raises an error where that is too much.
"""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What the images of one request may be.

    Attributes:
        max_bytes: Of each, as it is stored.
        max_pixels: Of each.
        max_images: Of a request.
        max_total_pixels: Of all of them.
    """

    max_bytes: int = 20 << 20
    max_pixels: int = 64_000_000
    max_images: int = 32
    max_total_pixels: int = 100_000_000


class ImageIntake:
    """Takes images in. `read_file` reads a file of the Files API; None where files are not served."""

    def __init__(self, store: MediaStore, limits: ImageLimits, fetcher: ImageFetcher) -> None:
        self._store = store
        self.limits = limits
        self._fetcher = fetcher
        self.read_file: ReadFile | None = None
        self._places = Turns(_AT_ONCE, _AT_ONCE - 1)
        self._held = Shares(MAX_HELD_BYTES, 1)
        self._log_limit = LogLimit(_log)

    async def stored(self, generation: Generation, tenant: str, ttl_s: float | None = None) -> Generation:
        """Return a generation with its images stored, for `ttl_s` or as long as it may wait.

        Raises `ApiError`: 400 if one is bad, 429 or 503 if it cannot be stored.
        """
        with self._holding(tenant) as hold:
            hold(sum(len(image.data or b"") for prompt in generation.prompts for image in prompt.images))
            return await self._stored(generation, tenant, ttl_s or stored_for_s(generation))

    @contextmanager
    def _holding(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yield what counts bytes as held by a tenant until the end; `ApiError` 503 where they are too many."""
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            if self._held.take(tenant, num_bytes) is not None:
                message = "Too many bytes of images are on their way to this gateway. Try again shortly."
                raise ApiError(503, message, code="too_many_image_bytes", retry_after_s=1.0)
            held += num_bytes

        try:
            yield hold
        finally:
            self._held.give_back(tenant, held)

    async def _stored(self, generation: Generation, tenant: str, ttl_s: float) -> Generation:
        prompts = []
        for prompt in generation.prompts:
            media = await self.references(prompt.images, tenant, ttl_s)
            for image in prompt.images:
                image.data = None
            places = tuple(image.where for image in prompt.images)
            prompts.append(msgspec.structs.replace(prompt, images=(), media=media, image_places=places))
        return msgspec.structs.replace(generation, prompts=tuple(prompts))

    def forget(self, media: Iterable[MediaRef], tenant: str) -> None:
        """Store images again when they come next: a worker did not find one of them."""
        for ref in media:
            self._store.forget(tenant, ref.digest)

    async def references(
        self, images: Sequence[ImageSource], tenant: str, ttl_s: float | None = None
    ) -> tuple[MediaRef, ...]:
        """Return the references of a request's images, in their order; without `ttl_s` none is stored.

        Raises as `stored`.
        """
        limits = self.limits
        if images and not limits.max_images:
            where = images[0].where
            message = f"'{where}' is an image, and this server reads none (--max-images 0)."
            raise ApiError(400, message, param=where, code="unsupported_image")
        if len(images) > limits.max_images:
            where = images[limits.max_images].where
            message = f"The request has {len(images)} images; at most {limits.max_images} are read."
            raise ApiError(400, message, param=where, code="too_many_images")
        found: list[MediaRef] = []
        total = 0
        for image in images:
            # Bytes of the body that were measured are not stored yet.
            is_known = image.ref is not None and (image.data is None or ttl_s is None)
            ref = image.ref if is_known else await self._read(image, tenant, ttl_s)
            assert ref is not None
            total += ref.width * ref.height
            if total > limits.max_total_pixels:
                message = f"The images up to '{image.where}' have {total} pixels together; at most "
                message += f"{limits.max_total_pixels} are read in one request."
                raise ApiError(400, message, param=image.where, code="image_too_large")
            found.append(ref)
        return tuple(found)

    async def measured(self, image: ImageSource, tenant: str, ttl_s: float | None) -> MediaRef:
        """Return the reference of an image that may be left out of its request, whose limits are not looked at.

        It is read once; one that is fetched, or a file, is stored for so long, if at all. Raises as `stored`.
        """
        if image.ref is None:
            image.ref = await self._read(image, tenant, None if image.data is not None else ttl_s)
        return image.ref

    async def _read(self, image: ImageSource, tenant: str, ttl_s: float | None) -> MediaRef:
        await self._places.take(tenant)
        try:
            with self._holding(tenant) as hold:
                data = await self._data(image, tenant, hold)
                return await self._reference(image, data, tenant, ttl_s)
        finally:
            self._places.give_back(tenant)

    async def _reference(self, image: ImageSource, data: bytes, tenant: str, ttl_s: float | None) -> MediaRef:
        limits = self.limits
        if len(data) > limits.max_bytes:
            problem = f"has {len(data)} bytes; at most {limits.max_bytes} are read."
            raise _refused(image, problem, "image_too_large")
        try:
            header = await _in_thread_if_large(read_header, data)
        except ImageProblemError as error:
            raise _refused(image, str(error)) from None
        if header.width * header.height > limits.max_pixels:
            problem = f"has {header.width}x{header.height} pixels; at most {limits.max_pixels} are read."
            raise _refused(image, problem, "image_too_large")
        digest = await self._store_or_hash(image, data, tenant, ttl_s)
        return MediaRef(
            digest=digest,
            num_bytes=len(data),
            width=header.width,
            height=header.height,
            mime=header.mime,
            detail=image.detail,
        )

    async def _data(self, image: ImageSource, tenant: str, hold: Callable[[int], None]) -> bytes:
        if image.data is not None:
            return image.data
        if image.url is not None:
            data = await self._fetcher.fetch(tenant, image.url, image.where)
            hold(len(data))
            return data
        assert image.file_id is not None
        if self.read_file is None:
            problem = "is a file, and this gateway has no store of files. Send its bytes in base64."
            raise _refused(image, problem, "files_not_served")

        def admit(num_bytes: int) -> None:
            if num_bytes > self.limits.max_bytes:
                problem = f"is a file of {num_bytes} bytes; at most {self.limits.max_bytes} are read."
                raise _refused(image, problem, "image_too_large")
            hold(num_bytes)

        stored = await self.read_file(tenant, image.file_id, admit)
        if stored is None:
            raise _refused(image, f"is not a file of this tenant: '{image.file_id[:64]}'.", "file_not_found")
        return stored

    async def _store_or_hash(self, image: ImageSource, data: bytes, tenant: str, ttl_s: float | None) -> bytes:
        if ttl_s is None:
            return (await _in_thread_if_large(hashlib.sha256, data)).digest()
        try:
            return await self._store.put(tenant, data, ttl_s)
        except MediaFullError as error:
            status, code = (429, "image_quota_exceeded") if error.is_own else (503, "image_store_full")
            raise ApiError(status, str(error), param=image.where, code=code, retry_after_s=60.0) from error
        except MediaStoreError as error:
            self._log_limit.warning("", "images cannot be stored: %s", error)
            message = "The server's store of images cannot be used at the moment. Try again shortly."
            raise ApiError(503, message, code="image_store_unavailable", retry_after_s=5.0) from error


def stored_for_s(generation: Generation) -> float:
    """Return how long the images of a generation are stored, in seconds."""
    return BATCH_TTL_S if generation.waits_long else INTERACTIVE_TTL_S


async def _in_thread_if_large(read: Callable[[bytes], Result], data: bytes) -> Result:
    return read(data) if len(data) <= _LARGE_BYTES else await asyncio.to_thread(read, data)


def _refused(image: ImageSource, problem: str, code: str = "invalid_image") -> ApiError:
    return ApiError(400, f"The image at '{image.where}' {problem}", param=image.where, code=code)
