"""GPU results as JSON lines, with what is needed to repeat and to compare them. Needs nothing but torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ops.bench.gpu.case import OURS
from ops.bench.gpu.ceilings import Ceilings
from ops.bench.gpu.run import CaseResult, CheckResult
from ops.bench.record import append_lines, origin

FILE_NAME = "gpu.jsonl"
_PACKAGES = ("torch", "triton", "transformers", "flash_attn_3", "flash_attn", "flashinfer-python")


class RunRecord:
    """Appends to the file as results come, so that a run that is cut short keeps what it has measured."""

    def __init__(self, directory: Path, device: torch.device, ceilings: Ceilings | None, command: str) -> None:
        """Write to `gpu.jsonl` in `directory`, which is made if need be."""
        self._path = directory / FILE_NAME
        self._common = origin(command, _PACKAGES) | {"machine": _machine(device)}
        if ceilings is not None:
            rates = {"bytes_per_s": ceilings.bandwidth, "matmul_flop_per_s": ceilings.matmul_rate}
            self._common["ceilings"] = rates

    def append_checks(self, checks: Sequence[CheckResult]) -> None:
        """Append one line a check."""
        self._append([check_row(check) for check in checks])

    def append_case(self, case: CaseResult, is_right: bool) -> None:
        """Append the line of a case, and whether its op passed all checks."""
        self._append([case_row(case) | {"is_right": is_right}])

    def _append(self, rows: list[dict[str, object]]) -> None:
        append_lines(self._path, [self._common | row for row in rows])


def append_failure(directory: Path, command: str, suite: str, reason: str) -> None:
    """Append that the process of a suite ended before its suite did, as a check that failed."""
    failed = check_row(CheckResult(suite, "process", None, 0.0, reason))
    append_lines(directory / FILE_NAME, [origin(command, _PACKAGES) | failed])


def check_row(result: CheckResult) -> dict[str, object]:
    """Return what is recorded of a check. JSON has no NaN: it becomes text."""
    error = result.error if result.error is None or result.error == result.error else "nan"
    return {
        "check": result.op,
        "shape": result.label,
        "error": error,
        "tolerance": result.tolerance,
        "is_right": result.is_right,
        "failure": result.failure,
    }


def case_row(result: CaseResult) -> dict[str, object]:
    """Return what is recorded of a case."""
    best = result.best_baseline
    ours = result.timings.get(OURS)
    return {
        "op": result.op,
        "shape": result.label,
        "floor_us": round(result.floor_s * 1e6, 3),
        "ceiling_fraction": result.fraction and round(result.fraction, 4),
        "idle_share": None if result.idle_share is None else round(result.idle_share, 4),
        "tokens_per_s": result.tokens_per_s and round(result.tokens_per_s, 1),
        "best_baseline": best,
        "speedup": round(result.timings[best].seconds / ours.seconds, 3) if best and ours else None,
        "candidates": {
            name: {
                "us": round(timing.seconds * 1e6, 3),
                "spread": round(timing.spread, 4),
                "is_graphed": timing.is_graphed,
            }
            for name, timing in result.timings.items()
        },
        "not_run": result.failures,
    }


def _machine(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return {"device": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }
