"""The images of requests in the form that the model reads: fetched, decoded and prepared, each at most once at a time.

How many images are worked on at once is bounded, and tenants take turns. How much memory pixels take is bounded too: a
request gets room for all of its images before the first one is fetched. What was prepared lately is kept for the next
turn of its conversation, as long as nothing else needs the room.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from gpu_worker.core.media import PreparedImage
from gpu_worker.media.decoder import Decoder, Pixels
from shared.background_tasks import BackgroundTasks
from shared.errors import BadRequestError, HeadraceError
from shared.media import IMAGE_NOT_FOUND, MediaRef
from shared.media_store import MediaStore, MissingMediaError

MAX_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 2))
_CHANNELS = 3

_Key = tuple[str, MediaRef]
"""A tenant, and all that it says of an image: what was checked for one reference says nothing of another."""


class Preparer(Protocol):
    """Brings the pixels of an image into the form that a model reads; a thread calls it."""

    def prepare(self, ref: MediaRef, pixels: Pixels) -> PreparedImage:
        """Return the image.

        Raises:
            BadRequestError: The model cannot read it.
        """


class PreparedImages:
    """Owns the decoder, the turns of tenants, and what was prepared lately. Used from the event loop only."""

    def __init__(self, store: MediaStore, preparer: Preparer, max_bytes: int, decoder: Decoder | None = None) -> None:
        self._store = store
        self._preparer = preparer
        self._decoder = decoder or Decoder()
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._kept: OrderedDict[_Key, PreparedImage] = OrderedDict()
        self._running: dict[_Key, asyncio.Task[PreparedImage | HeadraceError]] = {}
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._tasks = BackgroundTasks()

    async def images(
        self, tenant: str, refs: Iterable[MediaRef], is_wanted: Callable[[], bool] = lambda: True
    ) -> list[PreparedImage]:
        """Return the images of a request, in their order.

        Raises:
            BadRequestError: One is not there, cannot be decoded or read; or they are too many for the worker's memory.
            MediaStoreError: They cannot be read at the moment.
            LimitedProcessError: They cannot be decoded at the moment.
            asyncio.CancelledError: They were not wanted any more.
        """
        refs = list(refs)
        num_bytes = sum(_CHANNELS * ref.width * ref.height for ref in dict.fromkeys(refs))
        await self._take_room(num_bytes)
        try:
            if not is_wanted():
                raise asyncio.CancelledError
            tasks = {ref: self._begin((tenant, ref)) for ref in refs}
            # None who goes away breaks off what others wait for.
            await asyncio.wait(set(tasks.values()))
            return [_prepared(tasks[ref].result(), number, len(refs)) for number, ref in enumerate(refs, 1)]
        finally:
            self._give_room(num_bytes)

    async def close(self) -> None:
        """End the process; what still waits fails."""
        for task in self._running.values():
            task.cancel()
        await self._decoder.close()
        await self._tasks.wait()

    def _begin(self, key: _Key) -> asyncio.Task[PreparedImage | HeadraceError]:
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = self._tasks.spawn(self._outcome(key), "prepare an image")
        return task

    async def _outcome(self, key: _Key) -> PreparedImage | HeadraceError:
        """Return an image, or why there is none: that is no failure of the task, and concerns who asked."""
        try:
            return await self._prepare(key)
        except HeadraceError as error:
            return error

    async def _prepare(self, key: _Key) -> PreparedImage:
        try:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            tenant, ref = key
            turn = self._turns.setdefault(tenant, asyncio.Semaphore(MAX_AT_ONCE))
            async with turn, self._places:
                try:
                    data = await self._store.get(tenant, ref)
                except MissingMediaError as error:
                    raise BadRequestError(str(error), "media", IMAGE_NOT_FOUND) from None
                pixels = await self._decoder.decode(ref, data)
                del data
                prepared = await asyncio.to_thread(self._preparer.prepare, ref, pixels)
            self._keep(key, prepared)
            return prepared
        finally:
            del self._running[key]

    def _keep(self, key: _Key, prepared: PreparedImage) -> None:
        num_bytes = prepared.values.nbytes
        self._used_bytes += num_bytes
        loop, own = asyncio.get_running_loop(), threading.get_ident()
        weakref.finalize(prepared, partial(_released, loop, own, partial(self._give_room, num_bytes)))
        self._kept[key] = prepared
        self._drop_kept(0)

    async def _take_room(self, num_bytes: int) -> None:
        """Wait until there is room, in the order of the calls."""
        if num_bytes > self._max_bytes:
            most = self._max_bytes // _CHANNELS
            message = f"The images have {num_bytes // _CHANNELS} pixels together; this worker reads {most} at most."
            raise BadRequestError(message, "media", "image_too_large")
        self._drop_kept(num_bytes)
        if self._waiting or self._used_bytes + num_bytes > self._max_bytes:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_bytes, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_room(num_bytes)
                raise
        else:
            self._used_bytes += num_bytes

    def _give_room(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
                continue
            self._drop_kept(wanted)
            if self._used_bytes + wanted > self._max_bytes:
                return
            self._waiting.popleft()
            self._used_bytes += wanted
            turn.set_result(None)

    def _drop_kept(self, num_bytes: int) -> None:
        while self._kept and self._used_bytes + num_bytes > self._max_bytes:
            self._kept.popitem(last=False)


def _prepared(outcome: PreparedImage | HeadraceError, number: int, num_images: int) -> PreparedImage:
    if isinstance(outcome, BadRequestError) and num_images > 1:
        message = f"Image {number} of {num_images}: {outcome}"
        raise BadRequestError(message, outcome.param, outcome.code) from outcome
    if isinstance(outcome, HeadraceError):
        raise outcome
    return outcome


def _released(loop: asyncio.AbstractEventLoop, own: int, give_room: Callable[[], None]) -> None:
    if threading.get_ident() == own:
        give_room()
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(give_room)
