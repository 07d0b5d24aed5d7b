"""Which file holds which table, and what decides its entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ops.bench.gpu.case import Entry
from ops.bench.gpu.timer import Timer
from ops.bench.gpu.tune import attention, linear, row_ops
from ops.bench.gpu.tune.choice import Tuning

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


def _table_of(op: str) -> Path:
    return Path("kernels") / op / "launch_table.py"


_ATTENTION = _table_of("paged_attention")
ALL_TABLES = (
    TunedTable("split_attention", _ATTENTION, attention.SPLIT_ATTENTION),
    TunedTable("small_gemm", _table_of("linear/dense/small_gemm"), linear.SMALL_GEMM, linear.preferred),
    TunedTable("split_attention_8bit", _ATTENTION, attention.SPLIT_ATTENTION_8BIT),
    TunedTable("chunk_attention", _ATTENTION, attention.CHUNK_ATTENTION),
    TunedTable("sampling", _table_of("sampling"), (row_ops.SAMPLING,)),
    TunedTable("packed_linear", _table_of("linear/gpu_packed"), linear.PACKED_LINEAR, linear.fused_rows),
    TunedTable("scaled_linear", _table_of("linear/gpu_scaled"), linear.SCALED_LINEAR, linear.kernel_rows),
    TunedTable("rope_kv_write", _table_of("rope_kv_write"), (row_ops.ROPE_KV_WRITE,)),
    TunedTable("rms_norm", _table_of("rms_norm"), (row_ops.RMS_NORM,)),
    TunedTable("silu_mul", _table_of("activation"), (row_ops.SILU_MUL,)),
)
