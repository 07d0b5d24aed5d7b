"""Generation and size of a GPU, by which launch tables choose. There is no autotuner at run time."""

from __future__ import annotations

import enum
import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

_Entries = TypeVar("_Entries")
_Launch = TypeVar("_Launch")
Rows = Mapping[int, tuple[int, ...]]
"""A generation's launches: for each size up to which a launch serves, the values of its fields."""


class GpuGeneration(enum.Enum):
    """GPUs that want the same tile sizes: their first compute capability, and kilobytes of shared memory a program."""

    AMPERE = (80, 163)
    """Compute capabilities 8.0 and 8.7: mma.sync and cp.async."""
    ADA = (86, 99)
    """Compute capabilities 8.6, 8.9 and 12: the same instructions, less shared memory."""
    HOPPER = (90, 227)
    """Compute capability 9: wgmma where a tile has 64 rows or more, its sums in registers."""
    BLACKWELL = (100, 227)
    """Compute capabilities 10 and 11: tcgen05 where a tile has 64 rows or more, its sums in a memory of their own."""

    @property
    def max_shared_bytes(self) -> int:
        """Return the shared memory that one program may use."""
        return self.value[1] * 1024

    @property
    def is_datacenter(self) -> bool:
        """Return True from Hopper on, where matrix instructions read their operands from shared memory."""
        return self in (GpuGeneration.HOPPER, GpuGeneration.BLACKWELL)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that a launch is configured for."""

    generation: GpuGeneration
    num_multiprocessors: int


def generation_of(major: int, minor: int) -> GpuGeneration:
    """Return the generation of a compute capability; older ones than 8.0 are treated as the smallest."""
    if major in (10, 11):
        return GpuGeneration.BLACKWELL
    if major == 9:
        return GpuGeneration.HOPPER
    if (major, minor) in ((8, 0), (8, 7)):
        return GpuGeneration.AMPERE
    return GpuGeneration.ADA


def by_generation(table: Mapping[str, _Entries]) -> dict[GpuGeneration, _Entries]:
    """Return what a launch table has for each generation; Blackwell takes Hopper's entries where it has none."""
    named = {GpuGeneration[name]: entries for name, entries in table.items()}
    return {GpuGeneration.BLACKWELL: named[GpuGeneration.HOPPER]} | named


def entry_of(fields: str, row: tuple[int, ...]) -> dict[str, int]:
    """Return a row of a launch table by the names of its fields."""
    return dict(zip(fields.split(), row, strict=True))


def read_table(
    make: Callable[..., _Launch], fields: str, table: Mapping[str, Rows]
) -> dict[GpuGeneration, dict[int, _Launch]]:
    """Make the launches of a table, by generation and size."""
    return {
        generation: {size: make(**entry_of(fields, row)) for size, row in rows.items()}
        for generation, rows in by_generation(table).items()
    }


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the description of a CUDA device, read once per process."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(generation_of(properties.major, properties.minor), properties.multi_processor_count)


@functools.cache
def is_triton_installed() -> bool:
    """Return True where Triton kernels can be imported; torch brings it along with CUDA on Linux."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Return True for devices that the Triton kernels run on."""
    return device.type == "cuda" and is_triton_installed()


@functools.cache
def has_float8(device: torch.device) -> bool:
    """Return True for CUDA devices that multiply float8 numbers: compute capability 8.9 and later."""
    return torch.cuda.get_device_capability(device) >= (8, 9)
