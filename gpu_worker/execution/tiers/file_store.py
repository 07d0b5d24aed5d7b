"""Stores of block files: a directory, which workers of several machines may mount, or a bucket.

In a directory a file is written beside its place under another name, synced and renamed: a visible file is complete,
also after a loss of power. The next process that looks sweeps the leftovers of a killed one. In a bucket an object
appears with its last byte.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterable
from collections.abc import Sequence as Values
from pathlib import Path
from typing import NamedTuple

from shared.errors import ConfigError
from shared.files import WRITING, AtomicFile, temporary_beside
from shared.objects.s3 import bucket_errors, open_bucket

_log = logging.getLogger(__name__)

ABANDONED_S = 300.0
"""Nothing takes so long to write."""
_BUCKET_TIMEOUT = "10s"
_MODE = 0o700
"""Of folders: the name of a file tells who can guess a prompt that it was computed."""

_NOT_FILES = (errno.ELOOP, errno.ENXIO)
"""What opening a symbolic link and a socket ends with."""

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
"""Why a disk may not be written for a time, with the right settings."""


class StoredFile(NamedTuple):
    """A file in a list; `modified` is Unix seconds by the clock of the store."""

    num_bytes: int
    modified: float


class Folder(NamedTuple):
    """A part of a store; a stamp that stays says that nothing was added or removed. None says nothing."""

    name: str
    stamp: int | None


class DirectoryStore:
    """A directory, with `maker/group/first two digits` as folders.

    All calls may take as long as a disk or a network takes, and raise `OSError`.

    Attributes:
        place: How messages name it.
        refresh_s: How often to look for what others have added.
    """

    name = "disk"
    refresh_s = 2.0

    def __init__(self, root: Path) -> None:
        """Use a directory, which is made if it is missing; `ConfigError` if it cannot be written.

        One whose disk is full, read-only or broken is used all the same: a worker that starts again must not fail.
        """
        self.place = f"the directory {root}"
        self._root = root
        # The latest time of any file: the store's own clock has come so far. That of this host may be ahead of it.
        self._newest = 0.0
        try:
            root.mkdir(_MODE, parents=True, exist_ok=True)
            probe = temporary_beside(root / "probe")
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno not in _OF_THE_DISK or not root.is_dir():
                raise ConfigError("HEADRACE_KV_DISK_PATH", f"{root} cannot be written: {error.strerror}") from None
            _log.warning("%s cannot be written (%s); the KV cache goes on without", self.place, error.strerror)

    def write(self, key: str, parts: Values[bytes | memoryview]) -> None:
        """Write a file beside its place, sync, and rename: it becomes visible once it is complete."""
        target = self._root / key
        try:
            file = AtomicFile(target)
        except FileNotFoundError:
            # Of the maker, since the directory itself may be older.
            target.parents[2].mkdir(_MODE, parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            file = AtomicFile(target)
        try:
            for part in parts:
                file.write(part)
            file.commit(syncs_directory=False)
        finally:
            with contextlib.suppress(OSError):
                file.abort()

    def read(self, key: str, most_bytes: int) -> bytes:
        """Return a file, which is then the most recently used; `FileNotFoundError` if there is none.

        A longer file, or anything but a file, is neither read nor waited for: b"".
        """
        path = self._root / key
        try:
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NOT_FILES:
                return b""
            raise
        try:
            state = os.fstat(opened)
            if not stat.S_ISREG(state.st_mode) or state.st_size > most_bytes:
                return b""
            data = _read_all(opened, state.st_size)
            with contextlib.suppress(OSError):
                os.utime(opened)
        finally:
            os.close(opened)
        return data

    def delete(self, key: str) -> None:
        """Delete a file; one that is not there is deleted already."""
        (self._root / key).unlink(missing_ok=True)

    def folders(self) -> Iterable[Folder]:
        """Return the folders that have files."""
        for maker in _subfolders(self._root):
            for group in _subfolders(maker):
                for folder in _subfolders(group):
                    with contextlib.suppress(FileNotFoundError):
                        yield Folder(str(folder.relative_to(self._root)), folder.stat().st_mtime_ns)

    def files(self, folder: str) -> dict[str, StoredFile]:
        """List a folder, and delete abandoned files in it."""
        found: dict[str, StoredFile] = {}
        unfinished: list[tuple[str, float]] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            self._newest = max(self._newest, (self._root / folder).stat().st_mtime)
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(state.st_mode):
                        continue
                    self._newest = max(self._newest, state.st_mtime)
                    if not entry.name.startswith("."):
                        found[f"{folder}/{entry.name}"] = StoredFile(state.st_size, state.st_mtime)
                    elif entry.name.startswith(WRITING):
                        unfinished.append((entry.path, state.st_mtime))
        abandoned = min(self._newest, time.time()) - ABANDONED_S
        for path, modified in unfinished:
            if modified < abandoned:
                # One that cannot be deleted, as on a disk that is read-only since a crash, hides no others.
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return found

    def prune(self, folder: str) -> None:
        """Remove empty folders, up to the directory itself."""
        path = self._root / folder
        while path != self._root:
            try:
                path.rmdir()
            except OSError:
                return
            path = path.parent


class BucketStore:
    """A bucket, or what begins with a prefix in it; it promises what `DirectoryStore` does."""

    name = "bucket"
    refresh_s = 15.0

    def __init__(self, url: str) -> None:
        """Use `s3://bucket/prefix`; `ConfigError` if it is none, or the package is not installed."""
        self.place = f"the bucket {url}"
        self._client, self._bucket = open_bucket(url, "HEADRACE_KV_DISK_PATH", timeout=_BUCKET_TIMEOUT)
        self._listed: dict[str, dict[str, StoredFile]] = {}

    def write(self, key: str, parts: Values[bytes | memoryview]) -> None:
        """Put an object."""
        with bucket_errors():
            self._client.put(self._bucket, key, b"".join(parts), use_multipart=False)

    def read(self, key: str, most_bytes: int) -> bytes:
        """Get an object, whose size comes before its bytes."""
        with bucket_errors():
            found = self._client.get(self._bucket, key)
            return bytes(found.bytes()) if found.meta["size"] <= most_bytes else b""

    def delete(self, key: str) -> None:
        """Delete an object."""
        with contextlib.suppress(FileNotFoundError), bucket_errors():
            self._client.delete(self._bucket, key)

    def folders(self) -> Iterable[Folder]:
        """List everything, and return it by folder."""
        self._listed = {}
        with bucket_errors():
            for batch in self._client.list(self._bucket):
                for each in batch:
                    folder = each["path"].rpartition("/")[0]
                    stored = StoredFile(each["size"], each["last_modified"].timestamp())
                    self._listed.setdefault(folder, {})[each["path"]] = stored
        return [Folder(name, None) for name in self._listed]

    def files(self, folder: str) -> dict[str, StoredFile]:
        """Return the files listed in a folder."""
        return self._listed.pop(folder, {})

    def prune(self, folder: str) -> None:
        """Do nothing: a bucket has no folders."""


FileStore = DirectoryStore | BucketStore


def open_store(place: str) -> FileStore:
    """Open a directory or a bucket; `ConfigError` if it cannot be used."""
    return BucketStore(place) if "://" in place else DirectoryStore(Path(place))


def _read_all(file: int, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes and (part := os.read(file, num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, PermissionError):
        # The latter is another user's.
        return []
