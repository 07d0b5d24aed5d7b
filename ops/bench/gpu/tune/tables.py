"""Which file holds which table, and what decides its entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ops.bench.gpu.timer import Timer
from ops.bench.gpu.tune import attention, sampling, small_gemm
from ops.bench.gpu.tune.choice import Entry, Tuning

ROOT = Path(__file__).parents[4]


@dataclass(frozen=True, slots=True)
class TunedTable:
    """A table of one op.

    Attributes:
        name: As the command line takes it.
        path: Of the file, from the root of the repository.
        tunings: One for each entry.
        derive: Further tables of the same file, by name, that follow from the chosen entries of a generation.
    """

    name: str
    path: Path
    tunings: tuple[Tuning, ...]
    derive: Callable[[torch.device, Timer, Mapping[int, Entry]], dict[str, Any]] | None = None


def _preferred(device: torch.device, timer: Timer, entries: Mapping[int, Entry]) -> dict[str, Any]:
    return {"PREFERRED": small_gemm.preferred_products(device, timer, entries, small_gemm.ALL_PRODUCTS)}


_ATTENTION = Path("kernels/paged_attention/launch_table.py")
ALL_TABLES = (
    TunedTable("split_attention", _ATTENTION, attention.SPLIT_ATTENTION),
    TunedTable("small_gemm", Path("kernels/small_gemm/launch_table.py"), small_gemm.SMALL_GEMM, _preferred),
    TunedTable("chunk_attention", _ATTENTION, attention.CHUNK_ATTENTION),
    TunedTable("sampling", Path("kernels/sampling/launch_table.py"), sampling.SAMPLING),
)
