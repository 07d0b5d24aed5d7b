"""Decodes images in the process beside the worker: bytes in, pixels out, both through memory that the two share."""

from __future__ import annotations

import importlib.util
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt

from gpu_worker.media.decode_process import LIMITS, DecodeWork
from shared.errors import BadRequestError, HeadraceError
from shared.limited_link import LimitedLink
from shared.media import MediaRef

Pixels = npt.NDArray[np.uint8]
"""`[height, width, 3]`, RGB, turned as it is shown."""

# Streams go first: beside a busy thread of the engine, a process gets a quarter of a processor, and a slow one a tenth.
_NICENESS, _SLOW_NICENESS = 5, 10
_CODE = "invalid_image"


def can_decode() -> bool:
    """Whether Pillow is installed."""
    return importlib.util.find_spec("PIL") is not None


class SlowImageError(HeadraceError):
    """An image takes more processor time than it was given, and less than it may be given."""


class Decoder:
    """Owns the process, which starts with the first image."""

    def __init__(self, link: LimitedLink | None = None) -> None:
        module = "gpu_worker.media.decode_process"
        self._link = link or LimitedLink(module, LIMITS.time_s, what="the process that decodes images")

    async def decode(self, ref: MediaRef, data: bytes, cpu_s: float = LIMITS.cpu_s) -> Pixels:
        """Return the pixels of an image.

        Raises:
            SlowImageError: It takes more than `cpu_s` seconds of processor time, which are less than the limit.
            BadRequestError: It is broken, is not what its reference says, or takes more than is allowed.
            LimitedProcessError: The process does not answer.
        """
        with _shared_file(len(data)) as (source, source_path), _shared_file(3 * ref.width * ref.height) as target:
            with mmap.mmap(source, len(data)) as memory:
                memory[:] = data
            asked = DecodeWork(source_path, target[1], ref.mime, ref.width, ref.height, cpu_s)
            niceness = _NICENESS if cpu_s < LIMITS.cpu_s else _SLOW_NICENESS
            outcome = await self._link.ask(msgspec.msgpack.encode(asked), niceness)
            if outcome.is_late and cpu_s < LIMITS.cpu_s:
                raise SlowImageError
            if outcome.content is None:
                what = f"{LIMITS.cpu_s:g} s" if outcome.is_late else f"{LIMITS.memory_bytes >> 20} MB"
                raise BadRequestError(f"The image takes more than {what} to be decoded.", "media", _CODE)
            if outcome.content:
                raise BadRequestError(f"The image {outcome.content.decode()}", "media", _CODE)
            # The mapping keeps the memory when the file is closed, for as long as the array is there.
            pixels = np.frombuffer(mmap.mmap(target[0], 3 * ref.width * ref.height), np.uint8)
            return pixels.reshape(ref.height, ref.width, 3)

    async def close(self) -> None:
        """End the process."""
        await self._link.close()


@contextmanager
def _shared_file(num_bytes: int) -> Iterator[tuple[int, str]]:
    """Yield a file in memory that has no name in any directory, and a path by which a child opens it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headrace-image", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(prefix="headrace-image-")
    try:
        os.truncate(descriptor, num_bytes)
        yield descriptor, path
    finally:
        os.close(descriptor)
        if not path.startswith("/proc/"):
            os.unlink(path)
