"""The images of requests in the form that the model reads: fetched, decoded and prepared, each at most once at a time.

How many images are worked on at once is bounded, and so is how much memory pixels take: a request gets room for all of
its images before the first one is fetched. Places and room go to the tenant whose images have taken the least time, and
no tenant takes all of either. An image that is not decoded in a second of processor time gives its place and its room
to others, and is begun again where slow ones have their turns: one at a time, which has room whether there is any or
not. Work whose requests have ended is not started. Prepared images are kept for the next turn of the conversation, as
long as nothing else needs the room.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gpu_worker.core.clients import Clients
from gpu_worker.core.media import PreparedImage
from gpu_worker.media.decode_process import LIMITS
from gpu_worker.media.decoder import Decoder, Pixels, SlowImageError
from gpu_worker.media.fair_semaphore import FairSemaphore
from shared.background_tasks import BackgroundTasks
from shared.errors import BadRequestError, HeadraceError
from shared.media import IMAGE_NOT_FOUND, MediaRef, about_image
from shared.media_store import MediaStore, MissingMediaError

MAX_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 2))
QUICK_CPU_S = 1.0
"""Of processor time: photos of phones take a third of it, and 64 million pixels up to twice."""
MAX_SLOW_REQUESTS = 8
"""Of a tenant whose slow images wait or are decoded; more of them are refused."""
_MAX_KNOWN_SLOW = 1024
_CHANNELS = 3

_Key = tuple[str, MediaRef]
"""A tenant, and all that it says of an image: a check of one reference says nothing of another."""


class ImagesBusyError(HeadraceError):
    """A tenant has too many requests whose images take long to decode."""


class Preparer(Protocol):
    """Brings the pixels of an image into the form that a model reads."""

    def prepared_bytes(self, ref: MediaRef) -> int:
        """Return the memory of a prepared image, about so; `BadRequestError` if the model cannot read it."""

    def prepare(self, ref: MediaRef, pixels: Pixels) -> PreparedImage:
        """Return the image; a thread calls it.

        Raises:
            BadRequestError: The model cannot read it.
        """


@dataclass(slots=True, eq=False)
class _Work:
    """An image that is prepared. `wanted_by` are those who wait for it: whether each still wants it.

    `request` began it, and is only compared. `num_bytes` of room are held for it.
    """

    request: object
    task: asyncio.Task[PreparedImage | HeadraceError]
    wanted_by: list[Callable[[], bool]]
    num_bytes: int = 0
    has_begun: bool = False
    is_slow: bool = False

    def check_wanted(self) -> None:
        """Stop if every request for the image has ended."""
        if not any(is_wanted() for is_wanted in self.wanted_by):
            raise asyncio.CancelledError


class PreparedImages:
    """Owns the decoder, the turns of tenants, and a cache of prepared images. Used from the event loop only."""

    def __init__(self, store: MediaStore, preparer: Preparer, max_bytes: int, decoder: Decoder | None = None) -> None:
        self._store = store
        self._preparer = preparer
        self._decoder = decoder or Decoder()
        self._kept: OrderedDict[_Key, PreparedImage] = OrderedDict()
        self._running: dict[_Key, _Work] = {}
        # A tenant's counter is the seconds for which its images had a place.
        self._tenants = Clients()
        self._room = FairSemaphore(
            max_bytes,
            self._tenants,
            keeps_room=True,
            reclaim=self._drop_kept,
            reclaimable=lambda: sum([prepared.values.nbytes for prepared in self._kept.values()]),
        )
        # One tenant takes `MAX_AT_ONCE`; the last place is for the others.
        self._places = FairSemaphore(MAX_AT_ONCE + 1, self._tenants, kept_free=1)
        self._slow_places = FairSemaphore(1, self._tenants)
        self._num_slow: dict[str, Counter[object]] = {}
        self._known_slow: OrderedDict[_Key, None] = OrderedDict()
        self._tasks = BackgroundTasks()

    async def images(
        self, tenant: str, refs: Iterable[MediaRef], is_wanted: Callable[[], bool] = lambda: True
    ) -> list[PreparedImage]:
        """Return the images of a request, in their order. After one that fails, no other one is begun.

        Raises:
            BadRequestError: One is not there, cannot be decoded or read; or they are too many for the worker's memory.
            MediaStoreError: They cannot be read at the moment.
            LimitedProcessError: They cannot be decoded at the moment.
            ImagesBusyError: Too many requests of the tenant have slow images.
            asyncio.CancelledError: They were not wanted any more.
        """
        refs = list(refs)
        num_bytes = sum(map(self._num_bytes, set(refs)))
        if num_bytes > self._room.capacity:
            pixels, most = num_bytes // _CHANNELS, self._room.capacity // _CHANNELS
            message = f"The images have {pixels} pixels together (those that the model reads, if they are more); "
            message += f"this worker reads {most} at most."
            raise BadRequestError(message, "media", "image_too_large")
        await self._room.acquire(tenant, num_bytes, is_wanted)
        request = object()
        works = {ref: self._begin(tenant, ref, is_wanted, request) for ref in dict.fromkeys(refs)}
        try:
            await _until_one_fails({work.task for work in works.values()})
            tasks = [works[ref].task for ref in refs]
            return [_prepared(task.result(), n, len(refs)) for n, task in enumerate(tasks) if task.done()]
        finally:
            for ref, work in works.items():
                self._leave((tenant, ref), work, is_wanted)

    async def close(self) -> None:
        """End the process; what still waits fails."""
        for work in self._running.values():
            work.task.cancel()
        await self._decoder.close()
        await self._tasks.wait()

    def _begin(self, tenant: str, ref: MediaRef, is_wanted: Callable[[], bool], request: object) -> _Work:
        """Begin an image, or join those who wait for it; its room is given back when it has ended."""
        key = (tenant, ref)
        work = self._running.get(key)
        if work is None:
            task = self._tasks.spawn(self._outcome(key), "prepare an image")
            work = self._running[key] = _Work(request, task, [])
            work.task.add_done_callback(lambda _: self._give_room(work, tenant))
        work.wanted_by.append(is_wanted)
        work.num_bytes += self._num_bytes(ref)
        if work.is_slow and not work.has_begun:
            self._give_room(work, tenant)
        return work

    def _give_room(self, work: _Work, tenant: str) -> None:
        num_bytes, work.num_bytes = work.num_bytes, 0
        self._room.release(tenant, num_bytes)

    def _leave(self, key: _Key, work: _Work, is_wanted: Callable[[], bool]) -> None:
        work.wanted_by.remove(is_wanted)
        if not (work.wanted_by or work.has_begun) and self._running.get(key) is work:
            del self._running[key]
            work.task.cancel()

    async def _outcome(self, key: _Key) -> PreparedImage | HeadraceError:
        """Return an image, or why there is none: that is not a failure of the task, and concerns who asked."""
        work = self._running[key]
        try:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            if key not in self._known_slow:
                with contextlib.suppress(SlowImageError):
                    return await self._prepare(key, work, self._places, QUICK_CPU_S)
            return await self._prepare_slow(key, work)
        except HeadraceError as error:
            return error
        finally:
            if self._running.get(key) is work:
                del self._running[key]

    async def _prepare_slow(self, key: _Key, work: _Work) -> PreparedImage:
        self._known_slow[key] = None
        if len(self._known_slow) > _MAX_KNOWN_SLOW:
            self._known_slow.popitem(last=False)
        with self._slow_request(key[0], work.request):
            work.has_begun, work.is_slow = False, True
            self._give_room(work, key[0])
            return await self._prepare(key, work, self._slow_places, LIMITS.cpu_s)

    @contextlib.contextmanager
    def _slow_request(self, tenant: str, request: object) -> Iterator[None]:
        """Count a slow image of a request; `ImagesBusyError` if too many requests of its tenant have such."""
        requests = self._num_slow.setdefault(tenant, Counter())
        if len(requests.keys() | {request}) > MAX_SLOW_REQUESTS:
            what = f"{MAX_SLOW_REQUESTS} of your requests wait for images that take long to decode"
            raise ImagesBusyError(f"{what}. Send smaller ones, or wait until one has ended.")
        requests[request] += 1
        try:
            yield
        finally:
            requests[request] -= 1
            if not requests[request]:
                del requests[request]
            if not requests:
                self._num_slow.pop(tenant, None)

    async def _prepare(self, key: _Key, work: _Work, places: FairSemaphore, cpu_s: float) -> PreparedImage:
        tenant = key[0]
        await places.acquire(tenant, 1)
        if work.is_slow:
            work.num_bytes = self._num_bytes(key[1])
            self._room.take(tenant, work.num_bytes)
        began = time.monotonic()
        try:
            return await self._prepare_now(key, work, cpu_s)
        finally:
            self._tenants.account(tenant).counter += time.monotonic() - began
            places.release(tenant, 1)

    async def _prepare_now(self, key: _Key, work: _Work, cpu_s: float) -> PreparedImage:
        tenant, ref = key
        work.check_wanted()
        work.has_begun = True
        try:
            data = await self._store.get(tenant, ref)
        except MissingMediaError as error:
            raise BadRequestError(str(error), "media", IMAGE_NOT_FOUND) from None
        work.check_wanted()
        pixels = await self._decoder.decode(ref, data, cpu_s)
        del data
        prepared = await asyncio.to_thread(self._preparer.prepare, ref, pixels)
        self._keep(key, prepared)
        return prepared

    def _num_bytes(self, ref: MediaRef) -> int:
        """Return the memory that an image needs: its pixels, or those that the model reads if they are more."""
        return max(_CHANNELS * ref.width * ref.height, self._preparer.prepared_bytes(ref))

    def _keep(self, key: _Key, prepared: PreparedImage) -> None:
        num_bytes = prepared.values.nbytes
        self._room.take(key[0], num_bytes)
        loop, own = asyncio.get_running_loop(), threading.get_ident()
        weakref.finalize(prepared, partial(_released, loop, own, partial(self._room.release, key[0], num_bytes)))
        self._kept[key] = prepared
        self._drop_kept(lambda: not self._room.is_overdrawn)

    def _drop_kept(self, has_room: Callable[[], bool], tenant: str | None = None) -> None:
        """Drop the oldest images, of one tenant or of all, until there is room."""
        for key in list(self._kept):
            if has_room():
                return
            if tenant in (None, key[0]):
                del self._kept[key]


async def _until_one_fails(tasks: set[asyncio.Task[PreparedImage | HeadraceError]]) -> None:
    """Wait until all have ended, or one without an image."""
    while tasks:
        ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if any(isinstance(task.result(), HeadraceError) for task in ended):
            return


def _prepared(outcome: PreparedImage | HeadraceError, index: int, num_images: int) -> PreparedImage:
    if isinstance(outcome, BadRequestError):
        raise about_image(outcome, index, num_images) from outcome
    if isinstance(outcome, HeadraceError):
        raise outcome
    return outcome


def _released(loop: asyncio.AbstractEventLoop, own: int, give_room: Callable[[], None]) -> None:
    if threading.get_ident() == own:
        give_room()
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(give_room)
