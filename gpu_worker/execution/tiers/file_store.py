"""What a store of files of blocks promises."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import NamedTuple, Protocol


class StoredFile(NamedTuple):
    """A file in a list; `modified` is Unix seconds by the clock of the store."""

    num_bytes: int
    modified: float


class Folder(NamedTuple):
    """A part of a store; a stamp that stays says that nothing was added or removed. None says nothing."""

    name: str
    stamp: int | None


class FileStore(Protocol):
    """Where files of blocks are. All calls may take as long as a disk or a network takes, and raise `OSError`.

    Attributes:
        place: How messages name it.
        refresh_s: How often to look for what others have added.
    """

    name: str
    place: str
    refresh_s: float

    def write(self, key: str, parts: Values[bytes | memoryview]) -> None:
        """Write a file; it becomes visible once it is complete and synced."""

    def read(self, key: str, most_bytes: int) -> bytes:
        """Return a file; `FileNotFoundError` where there is none. What is longer, or not a file, is not read: b""."""

    def delete(self, key: str) -> None:
        """Delete a file; one that is not there is deleted already."""

    def folders(self) -> Iterable[Folder]:
        """List the folders that have files."""

    def files(self, folder: str) -> dict[str, StoredFile]:
        """List the files of a folder by key, and sweep what was left behind there."""

    def prune(self, folder: str) -> None:
        """Remove a folder, and those above it, as far as nothing is in them."""
