"""Files in a directory, which several machines may mount.

An object is written beside its place under another name, synced to the disk and renamed: readers see all of it, also
after a loss of power. Files that a killed process has left behind are deleted after a day.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from shared.files import WRITING, AtomicFile, temporary_beside
from shared.objects.store import (
    MissingObjectError,
    StoreAwayError,
    StoredObject,
    StoreError,
    StoreFullError,
    check_key,
)

# NATS and Redis may write to the same disk: some room is left for them.
KEPT_FREE_BYTES = 64 << 20
_ABANDONED_S = 86_400.0
_THREADS = 4
# A mount may hang for ever, and its thread with it.
TIMEOUT_S = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
AWAY = frozenset(
    {errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.EHOSTDOWN}
    | {errno.EREMOTEIO, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTUNREACH}
)
"""Errors of storage that does not answer; others are of a wrong path, or of rights to it."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _in_thread(
    work: Callable[Concatenate[DirectoryStore, Given], Result],
) -> Callable[Concatenate[DirectoryStore, Given], Coroutine[Any, Any, Result]]:
    @wraps(work)
    async def run(self: DirectoryStore, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await self.run(partial(work, self, *args, **kwargs))

    return run


class DirectoryStore:
    """Reads and writes in threads of its own: a disk may be slow, and streams must not wait for it."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self.place = f"the directory {root}"
        self._root = root
        self._threads = ThreadPoolExecutor(_THREADS, "files")

    @_in_thread
    def create(self, key: str, data: bytes) -> None:
        """Write a file beside its place, and link it there unless there is one."""
        target = self._made(key)
        temporary = temporary_beside(target)
        temporary.write_bytes(data)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, target)
        finally:
            temporary.unlink()

    @_in_thread
    def check_room(self, num_bytes: int) -> None:
        """Compare with the free room of the file system."""
        free = shutil.disk_usage(self._root).free
        if num_bytes + KEPT_FREE_BYTES > free:
            raise StoreFullError(f"{self.place} has {free >> 20} MB free, and {num_bytes >> 20} MB more are wanted")

    @_in_thread
    def writer(self, key: str) -> DirectoryWriter:
        """Begin a file beside its place."""
        return DirectoryWriter(self, AtomicFile(self._made(key)))

    @_in_thread
    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Read a range of a file."""
        with (self._root / check_key(key)).open("rb") as file:
            file.seek(start)
            return file.read(-1 if num_bytes is None else num_bytes)

    @_in_thread
    def objects(self, folder: str) -> list[StoredObject]:
        """List a folder, and delete abandoned temporary files in it."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        state = entry.stat(follow_symlinks=False)
                        found.append(StoredObject(entry.name, state.st_size, state.st_mtime))
        writing = [each for each in found if each.name.startswith(WRITING)]
        if writing:
            self._delete_abandoned(folder, writing)
        return sorted(each for each in found if not each.name.startswith("."))

    def _delete_abandoned(self, folder: str, writing: list[StoredObject]) -> None:
        # One that cannot be deleted hides no others.
        with contextlib.suppress(OSError):
            # By the clock of the file system, which may be another machine's.
            probe = temporary_beside(self._root / folder / "clock")
            probe.touch(mode=0o600)
            now = probe.stat().st_mtime
            probe.unlink()
            for name, _, modified in writing:
                if modified < now - _ABANDONED_S:
                    with contextlib.suppress(OSError):
                        (self._root / folder / name).unlink()

    @_in_thread
    def folders(self, folder: str = "") -> list[str]:
        """List the directories in a directory."""
        with os.scandir(self._root / folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    @_in_thread
    def delete(self, key: str) -> None:
        """Delete a file."""
        (self._root / check_key(key)).unlink(missing_ok=True)

    @_in_thread
    def delete_folder(self, folder: str) -> None:
        """Delete a directory with its files."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / check_key(folder))

    async def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _made(self, key: str) -> Path:
        """Return the place of a file, whose folders are made, each for its owner alone."""
        for each in reversed(Path(check_key(key)).parents):
            (self._root / each).mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._root / key

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work on the directory in a thread; raise `StoreError` if it fails."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise StoreAwayError(f"{self.place} does not answer") from error
        except FileNotFoundError as error:
            raise MissingObjectError(f"{self.place} has no such file") from error
        except OSError as error:
            kind = StoreFullError if error.errno in _FULL else StoreAwayError if error.errno in AWAY else StoreError
            raise kind(f"{self.place} cannot be used: {error.strerror or error}") from error


class DirectoryWriter:
    """A file that is being written. Made by `DirectoryStore.writer`."""

    def __init__(self, store: DirectoryStore, file: AtomicFile) -> None:
        self._store = store
        self._file = file

    async def write(self, data: bytes) -> None:
        """Add bytes."""
        await self._store.run(partial(self._file.write, data))

    async def commit(self) -> None:
        """Sync the file and rename it."""
        await self._store.run(self._file.commit)

    async def abort(self) -> None:
        """Delete the file, unless it was renamed."""
        with contextlib.suppress(StoreError):
            await self._store.run(self._file.abort)
