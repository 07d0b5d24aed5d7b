"""Opens the store of files that a setting names."""

from __future__ import annotations

from pathlib import Path

from gpu_worker.execution.tiers.bucket import BucketStore
from gpu_worker.execution.tiers.directory import DirectoryStore
from gpu_worker.execution.tiers.file_store import FileStore


def open_store(place: str) -> FileStore:
    """Open a directory or a bucket; `ConfigError` if it cannot be used."""
    return BucketStore(place) if "://" in place else DirectoryStore(Path(place))
