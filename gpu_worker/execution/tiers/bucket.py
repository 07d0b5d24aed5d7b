"""Files of blocks in a bucket, where an object appears with its last byte."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from pathlib import Path

from gpu_worker.execution.tiers.directory import DirectoryStore
from gpu_worker.execution.tiers.file_store import FileStore, Folder, StoredFile
from shared.objects.s3 import bucket_errors, open_bucket

_TIMEOUT = "10s"


class BucketStore:
    """A bucket, or what begins with a prefix in it."""

    name = "bucket"
    refresh_s = 15.0

    def __init__(self, url: str) -> None:
        """Use `s3://bucket/prefix`.

        Raises:
            ConfigError: It is none, or the package is not installed.
        """
        self.place = f"the bucket {url}"
        self._client, self._bucket = open_bucket(url, "HEADRACE_KV_DISK_PATH", timeout=_TIMEOUT)
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
        try:
            with bucket_errors():
                self._client.delete(self._bucket, key)
        except FileNotFoundError:
            return

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
        """Return what was listed of a folder."""
        return self._listed.pop(folder, {})

    def prune(self, folder: str) -> None:
        """Do nothing: a bucket has no folders."""


def open_store(place: str) -> FileStore:
    """Open a directory or a bucket; `ConfigError` if it cannot be used."""
    return BucketStore(place) if "://" in place else DirectoryStore(Path(place))
