"""Results of a suite, as text and as JSON lines with all that one needs to repeat and to compare them.

Needs nothing but torch. Printed are the checks that failed, then one line a case.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ops.bench.gpu.case import OURS, OURS_ON_DEVICE
from ops.bench.gpu.timer import Ceilings, Timing
from ops.bench.record import append_lines, origin

FILE_NAME = "gpu.jsonl"
HEADER = f"{'op':<18}{'shape':<38}{'ours µs':>10}{'ceiling':>9}  best baseline, then the others (µs, ours is × faster)"
_PACKAGES = ("torch", "triton", "transformers", "flash_attn_3", "flash_attn", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: its error, or why it did not finish."""

    op: str
    label: str
    error: float | None
    tolerance: float
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        """Return True where the op equals its oracle. NaN does not."""
        return self.error is not None and self.error <= self.tolerance

    def row(self) -> dict[str, object]:
        """Return the record. JSON has no NaN: it becomes text."""
        error = self.error if self.error is None or self.error == self.error else "nan"
        told: dict[str, object] = {"check": self.op, "shape": self.label, "error": error, "tolerance": self.tolerance}
        return told | {"is_right": self.is_right, "failure": self.failure}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: the time of each candidate that ran, and why the others did not."""

    op: str
    label: str
    floor_s: float
    timings: dict[str, Timing]
    failures: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def fraction(self) -> float | None:
        """Return the share of the ceiling that ours reaches."""
        return self.floor_s / self.timings[OURS].seconds if OURS in self.timings else None

    @property
    def idle_share(self) -> float | None:
        """Return the share of a whole step in which the device has nothing to do."""
        if OURS not in self.timings or OURS_ON_DEVICE not in self.timings:
            return None
        return 1 - self.timings[OURS_ON_DEVICE].seconds / self.timings[OURS].seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens that ours makes a second, where that says something."""
        return self.num_tokens / self.timings[OURS].seconds if self.num_tokens and OURS in self.timings else None

    @property
    def best_baseline(self) -> str | None:
        """Return the fastest candidate that is not ours."""
        others = [name for name in self.timings if not name.startswith(OURS)]
        return min(others, key=lambda name: self.timings[name].seconds, default=None)

    def row(self) -> dict[str, object]:
        """Return the record."""
        best = self.best_baseline
        ours = self.timings.get(OURS)
        return {
            "op": self.op,
            "shape": self.label,
            "floor_us": round(self.floor_s * 1e6, 3),
            "ceiling_fraction": self.fraction and round(self.fraction, 4),
            "idle_share": None if self.idle_share is None else round(self.idle_share, 4),
            "tokens_per_s": self.tokens_per_s and round(self.tokens_per_s, 1),
            "best_baseline": best,
            "speedup": round(self.timings[best].seconds / ours.seconds, 3) if best and ours else None,
            "candidates": {name: timing.row() for name, timing in self.timings.items()},
            "not_run": self.failures,
        }

    def line(self) -> str:
        """Return the printed line; `*` marks times that may hold the host's."""
        ours = self.timings.get(OURS)
        if ours is None:
            return f"{self.op:<18}{self.label:<38}{'-':>10}{'-':>9}  {self.failures.get(OURS, 'not run')}"
        others = sorted((timing.seconds, name) for name, timing in self.timings.items() if name != OURS)
        # A baseline leads, not another configuration of ours.
        others.sort(key=lambda pair: pair[1] != self.best_baseline)
        compared = [f"{name} {self.timings[name]} (×{seconds / ours.seconds:.2f})" for seconds, name in others]
        failed = [f"{name}: -" for name in self.failures]
        rates = []
        if self.tokens_per_s is not None:
            rates.append(f"{self.tokens_per_s:.0f} tokens/s")
        if self.idle_share is not None:
            rates.append(f"device idle {self.idle_share:.1%}")
        fraction = f"{self.fraction or 0:.1%}"
        return f"{self.op:<18}{self.label:<38}{ours!s:>10}{fraction:>9}  " + ", ".join(rates + compared + failed)


def check_lines(results: Sequence[CheckResult]) -> list[str]:
    """Return a line for each wrong check, and one for all that are right."""
    right = [result for result in results if result.is_right]
    lines = [
        f"WRONG {result.op:<17}{result.label:<52}"
        + (f"{result.error:.2e} of {result.tolerance:.0e}" if result.error is not None else str(result.failure))
        for result in results
        if not result.is_right
    ]
    if right:
        worst = max(right, key=lambda result: (result.error or 0.0) / (result.tolerance or 1.0))
        text = f"{worst.error:.2e} of {worst.tolerance:.0e} at {worst.label}"
        lines.append(f"ok    {worst.op:<17}{len(right)} checks, the farthest off {text}")
    return lines


def ceiling_line(ceilings: Ceilings) -> str:
    """Return the basis of the fractions."""
    memory = f"{ceilings.bandwidth / 1e12:.2f} TB/s copy, {ceilings.read_bandwidth / 1e12:.2f} TB/s read"
    return f"ceilings: {memory}, {ceilings.matmul_rate / 1e12:.0f} TFLOP/s bf16"


def failure_lines(results: Sequence[CaseResult]) -> list[str]:
    """Return why candidates did not run, each reason once."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        for name, reason in result.failures.items():
            reasons.setdefault(f"{name}: {reason}", []).append(f"{result.op} {result.label}")
    return [f"not run: {reason} [{len(places)}: {places[0]}]" for reason, places in reasons.items()]


class RunRecord:
    """Appends to the file as results come, so that an interrupted run keeps its measurements."""

    def __init__(
        self, directory: Path, device: torch.device, ceilings: Ceilings | None, command: str, process: int
    ) -> None:
        self._path = directory / FILE_NAME
        self._common = origin(command, _PACKAGES) | {"machine": machine_of(device), "process": process}
        if ceilings is not None:
            rates = {"bytes_per_s": ceilings.bandwidth, "matmul_flop_per_s": ceilings.matmul_rate}
            self._common["ceilings"] = rates

    def append(self, *results: CheckResult | CaseResult, **others: object) -> None:
        """Append a line a result, with what else is known of it."""
        append_lines(self._path, [self._common | result.row() | others for result in results])


def append_failure(directory: Path, command: str, process: int, suite: str, reason: str) -> None:
    """Append that the process of a suite ended before its suite did, as a check that failed.

    The process that starts the suites does not open the device, which may hang: the run's other rows name it.
    """
    path = directory / FILE_NAME
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    machine = next((row["machine"] for row in reversed(rows) if row.get("process") == process), {"device": "unknown"})
    failed = CheckResult(suite, "process", None, 0.0, reason)
    append_lines(path, [origin(command, _PACKAGES) | {"machine": machine, "process": process} | failed.row()])


def machine_of(device: torch.device) -> dict[str, Any]:
    """Return the record of a device."""
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
