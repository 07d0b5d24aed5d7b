"""Reads recorded results and groups them into runs: what one command measured on one machine at one commit.

Rows of a run lie together in their file, since a benchmark only appends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
_Figure = TypeVar("_Figure")
_REQUIRED = ("time", "machine", "command")


class MalformedResultError(ValueError):
    """A line of a results file cannot be read.

    Attributes:
        path: The file.
        line: Number of the line, from 1.
    """

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}; mend or remove the line")
        self.path = path
        self.line = line


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that one command recorded."""

    rows: tuple[Row, ...]

    @property
    def machine(self) -> str:
        """What the machine is called: its accelerator, or its processor and cores."""
        machine = self.rows[0]["machine"]
        return str(machine["device"]) if "device" in machine else f"{machine['cpu']}, {machine['cores']} cores"

    @property
    def origin(self) -> str:
        """Where the figures are from: machine, date, commit, how busy it was, command."""
        first = self.rows[0]
        parts = [self.machine, str(first["time"]).partition("T")[0], f"commit {first.get('commit') or 'unknown'}"]
        if "load_average" in first:
            parts.append(f"load average {first['load_average']}")
        return ", ".join(parts) + f": `{first['command']}`"


def read_runs(path: Path) -> list[Run]:
    """Return the runs of a results file, oldest first; none when there is no such file.

    Raises:
        MalformedResultError: A line is not a result.
    """
    if not path.exists():
        return []
    runs: list[list[Row]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = _parsed(path, number, text)
        if not runs or _run_key(runs[-1][-1]) != _run_key(row):
            runs.append([])
        runs[-1].append(row)
    return [Run(tuple(rows)) for rows in runs]


def latest(runs: list[Run], measure: Callable[[Run], _Figure | None]) -> tuple[Run, _Figure] | None:
    """Return the latest run that tells, and what it tells, on the machine that most rows are from.

    Figures of different machines do not compare, so one machine speaks for all.
    """
    told = [(run, figure) for run in runs if (figure := measure(run)) is not None]
    if not told:
        return None
    num_rows = Counter[str]()
    for run, _ in told:
        num_rows[run.machine] += len(run.rows)
    machine = num_rows.most_common(1)[0][0]
    return next((run, figure) for run, figure in reversed(told) if run.machine == machine)


def _parsed(path: Path, number: int, text: str) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise MalformedResultError(path, number, f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise MalformedResultError(path, number, "not a JSON object")
    for name in _REQUIRED:
        if name not in row:
            raise MalformedResultError(path, number, f"no {name!r}")
    machine = row["machine"]
    if not isinstance(machine, dict) or not ("device" in machine or {"cpu", "cores"} <= machine.keys()):
        raise MalformedResultError(path, number, "'machine' names neither a device nor a cpu and its cores")
    return row


def _run_key(row: Row) -> tuple[object, ...]:
    """Tell runs apart. Rows without a process are of benchmarks that record a run at one moment, or at one minute."""
    moment = row["process"] if "process" in row else str(row["time"])[:16]
    return json.dumps(row["machine"], sort_keys=True), row.get("commit"), row["command"], moment
