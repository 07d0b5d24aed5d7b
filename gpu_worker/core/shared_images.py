"""Pixels between a scheduler and the runner that encodes them."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

from gpu_worker.core.media import PreparedImage


class SharedImages:
    """The pixels of a scheduler's sequences, for a runner in the same process. Sequences own them."""

    def __init__(self) -> None:
        self._by_digest: WeakValueDictionary[bytes, PreparedImage] = WeakValueDictionary()

    def add(self, images: Iterable[PreparedImage]) -> None:
        """Offer the images of a sequence that the scheduler has taken in."""
        for image in images:
            self._by_digest[image.digest] = image

    def get(self, digest: bytes) -> PreparedImage | None:
        """Return an image; None when no sequence has it any more."""
        return self._by_digest.get(digest)
