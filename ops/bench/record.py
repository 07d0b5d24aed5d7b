"""Benchmark results as JSON lines under `ops/bench/results/`, with what is needed to repeat and to compare them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("msgspec", "nats-py", "uvloop", "httptools", "torch")


def append_record(benchmark: str, command: str, row: Mapping[str, object]) -> None:
    """Append one row to the benchmark's file. Rows of one process and command are one run."""
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": current_commit(),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version()} | installed_versions(_PACKAGES),
        "load_average": round(os.getloadavg()[0], 2),
        "command": command,
        "process": os.getpid(),
        **row,
    }
    with (_RESULTS / f"{benchmark}.jsonl").open("a") as results:
        results.write(json.dumps(record) + "\n")


def current_commit() -> str | None:
    """Return the commit of this checkout, or None where it is none."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed: a gateway has no torch."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
