"""Opens the store that a setting names: a directory, or a bucket as `s3://BUCKET/PREFIX`."""

from __future__ import annotations

import asyncio
import stat
import threading
from pathlib import Path

from shared.errors import ConfigError
from shared.objects.directory import AWAY, DirectoryStore
from shared.objects.s3 import S3Store
from shared.objects.store import ObjectStore, StoreError, identity

# Storage that does not answer within this time is opened later.
_CHECK_S = 3.0


async def opened_store(place: str, variable: str) -> tuple[ObjectStore, str]:
    """Return the store that the setting `variable` names, and its identity; `ConfigError` if it cannot be used."""
    await asyncio.to_thread(check_store, place, variable)
    store = store_of(place, variable)
    try:
        return store, await identity(store)
    except StoreError as error:
        raise ConfigError(variable, str(error)) from error


def store_of(place: str, variable: str) -> ObjectStore:
    """Return the store that the setting `variable` names, not opened yet; `ConfigError` if it names none.

    It does not access the storage: the event loop would wait for it.
    """
    if "://" in place and not place.startswith("s3://"):
        raise ConfigError(variable, f"{place!r} is neither a directory nor s3://BUCKET/PREFIX")
    return S3Store(place, variable) if place.startswith("s3://") else DirectoryStore(Path(place))


def check_store(place: str, variable: str) -> None:
    """Raise `ConfigError` for a setting that names no store, or a directory in a place that does not exist.

    Storage that does not answer passes after a few seconds. Not for the event loop.
    """
    store_of(place, variable)
    if "://" in place:
        return
    problems: list[str] = []
    checking = threading.Thread(target=lambda: problems.extend(_problems(place)), daemon=True)
    checking.start()
    checking.join(_CHECK_S)
    if problems:
        raise ConfigError(variable, problems[0])


def _problems(place: str) -> list[str]:
    parent = Path(place).absolute().parent
    try:
        # `is_dir` tells no errors from Python 3.14 on.
        has_parent = stat.S_ISDIR(parent.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        has_parent = False
    except OSError as error:
        return [] if error.errno in AWAY else [f"{place!r} cannot be used: {error.strerror}"]
    return [] if has_parent else [f"{place!r} would be made, but there is no {parent} either: make that first"]
