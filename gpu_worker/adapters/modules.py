"""Reads an adapter's directory into what the kernels read, whoever has named it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.reader import read_adapter
from gpu_worker.layers.adapters import AdapterTargets, Packed
from gpu_worker.models.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter that can be placed. `num_bytes` is what it takes in memory, `max_rank` the largest of its ranks."""

    packed: Packed
    max_rank: int
    num_bytes: int


def read_packed(directory: Path, targets: AdapterTargets, renamed: tuple[tuple[str, str], ...]) -> PackedAdapter:
    """Read and pack an adapter for the model of `targets`; `AdapterError` if it is not served. Any thread may do so."""
    try:
        adapter = read_adapter(directory, targets, renamed)
    except OSError as error:
        raise AdapterError(f"{error.filename} is missing or cannot be read ({error.strerror})") from None
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    return PackedAdapter(targets.pack(adapter.low_ranks), adapter.max_rank, adapter.num_bytes)
