"""GPU results as JSON lines, with what is needed to repeat and to compare them. Needs nothing but torch."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ops.bench.gpu.case import OURS
from ops.bench.gpu.ceilings import Ceilings
from ops.bench.gpu.run import CaseResult, CheckResult

FILE_NAME = "gpu.jsonl"
_PACKAGES = ("torch", "triton", "flash_attn_3", "flashinfer-python")


def append_records(
    directory: Path,
    device: torch.device,
    ceilings: Ceilings | None,
    checks: Sequence[CheckResult],
    cases: Sequence[CaseResult],
) -> Path:
    """Append one line a check and a case, and return the file."""
    directory.mkdir(parents=True, exist_ok=True)
    common: dict[str, object] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": _machine(device),
        "versions": {"python": platform.python_version()} | _versions(),
        "command": " ".join(["python", "-m", "ops.bench.gpu", *sys.argv[1:]]),
    }
    if ceilings is not None:
        common["ceilings"] = {"bytes_per_s": ceilings.bandwidth, "matmul_flop_per_s": ceilings.matmul_rate}
    rows = [check_row(result) for result in checks] + [case_row(result) for result in cases]
    path = directory / FILE_NAME
    with path.open("a") as file:
        file.writelines(json.dumps({**common, **row}) + "\n" for row in rows)
    return path


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


def _commit() -> str | None:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


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


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
