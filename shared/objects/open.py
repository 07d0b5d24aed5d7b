"""Opens the store that a setting names: a directory, or a bucket as `s3://BUCKET/PREFIX`."""

from __future__ import annotations

import stat
from pathlib import Path

from shared.errors import ConfigError
from shared.objects.directory import AWAY, DirectoryStore
from shared.objects.s3 import S3Store
from shared.objects.store import ObjectStore, StoreError, identity


async def opened_store(place: str, variable: str) -> tuple[ObjectStore, str]:
    """Return the store that the setting `variable` names, and its identity; `ConfigError` if it cannot be used."""
    store = store_of(place, variable)
    try:
        return store, await identity(store)
    except StoreError as error:
        raise ConfigError(variable, str(error)) from error


def store_of(place: str, variable: str) -> ObjectStore:
    """Return the store that the setting `variable` names, not opened yet; `ConfigError` if it names none."""
    if "://" in place and not place.startswith("s3://"):
        raise ConfigError(variable, f"{place!r} is neither a directory nor s3://BUCKET/PREFIX")
    if place.startswith("s3://"):
        return S3Store(place, variable)
    directory = Path(place)
    parent = directory.absolute().parent
    try:
        # `is_dir` tells no errors from Python 3.14 on.
        has_parent = stat.S_ISDIR(parent.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        has_parent = False
    except OSError as error:
        if error.errno not in AWAY:
            raise ConfigError(variable, f"{place!r} cannot be used: {error.strerror}") from error
        has_parent = True
    if not has_parent:
        raise ConfigError(variable, f"{place!r} would be made, but there is no {parent} either: make that first")
    return DirectoryStore(directory)
