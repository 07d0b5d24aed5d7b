"""Reads the adapters of `--lora-modules`, and those that are loaded while a worker runs."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from gpu_worker.adapters.config import CONFIG_NAME, WEIGHTS_NAME, AdapterError
from gpu_worker.adapters.loaded import VARIABLE, LoadedAdapters
from gpu_worker.adapters.reader import Adapter, read_adapter
from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.models.errors import CheckpointError
from shared.errors import ConfigError

_PIECE_BYTES = 1 << 20

logger = logging.getLogger(__name__)


def read_module(directory: Path, targets: AdapterTargets, renamed: tuple[tuple[str, str], ...]) -> tuple[Adapter, str]:
    """Read an adapter, and the digest of its content; `AdapterError` if it is not served or changes meanwhile."""
    try:
        digest = content_digest(directory)
        adapter = read_adapter(directory, targets, renamed)
        is_same = content_digest(directory) == digest
    except OSError as error:
        raise AdapterError(f"{error.filename} is missing or cannot be read ({error.strerror})") from None
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    if not is_same:
        raise AdapterError(f"{directory} changed while it was read; load it again when it is complete")
    return adapter, digest


def content_digest(directory: Path) -> str:
    """Return the SHA-256 of what an adapter computes: of its configuration and its weights."""
    digest = hashlib.sha256()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        path = directory / name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def load_modules(
    modules: dict[str, Path], targets: AdapterTargets, renamed: tuple[tuple[str, str], ...]
) -> LoadedAdapters:
    """Load adapters, each into a slot of its own; equal ones share one. `ConfigError` if one is not served."""
    loaded = LoadedAdapters(targets.num_slots)
    for name, directory in modules.items():
        try:
            adapter, digest = read_module(directory, targets, renamed)
        except AdapterError as error:
            raise ConfigError(VARIABLE, f"the adapter {name!r} of {directory} cannot be served: {error}") from None
        if not loaded.is_resident(digest):
            slot = loaded.take_slot()
            assert slot is not None, "there are as many places as names"
            targets.place(slot, targets.pack(adapter.low_ranks), adapter.max_rank)
            loaded.add(digest, slot)
        loaded.put(name, digest)
        logger.info("adapter %s: %s, rank %d, %d bytes", name, digest[:12], adapter.max_rank, adapter.num_bytes)
    return loaded
