"""The part of the memory for pixels in which images that take long to decode wait, shared by requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_worker.core.clients import Clients
from gpu_worker.media.fair_semaphore import FairSemaphore
from shared.errors import HeadraceError


class ImagesBusyError(HeadraceError):
    """Images of other requests fill the memory for those that take long to decode."""


class SlowShare:
    """Owns the share and what each request has in it. Used from one event loop.

    A request that comes while no other one has slow images is never refused, however many of its own are slow: those
    that go beyond the share wait, and leave what is free in it to others. There is one such request at a time.
    """

    def __init__(self, capacity: int, clients: Clients) -> None:
        self._room = FairSemaphore(capacity, clients, keeps_room=True)
        self._num_images: Counter[object] = Counter()
        self._first: object = None

    @contextmanager
    def held(self, request: object, tenant: str, num_bytes: int) -> Iterator[None]:
        """Hold room for a slow image of a request, until it is decoded.

        Raises:
            ImagesBusyError: Other requests have the room.
        """
        if not self._num_images.keys() - {request}:
            self._first = request
        has_room = self._room.try_take(tenant, num_bytes)
        if not has_room and request is not self._first:
            message = "Images of other requests that take long to decode are waiting. Send a smaller one, or wait."
            raise ImagesBusyError(message)
        self._num_images[request] += 1
        try:
            yield
        finally:
            self._leave(request)
            if has_room:
                self._room.release(tenant, num_bytes)

    def _leave(self, request: object) -> None:
        self._num_images[request] -= 1
        if not self._num_images[request]:
            del self._num_images[request]
            if self._first is request:
                self._first = None
