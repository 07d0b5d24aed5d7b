"""What all bench commands share: their parsers with lists of values, and their results as JSON lines.

Results go to `ops/bench/results/`, with the data needed to repeat and compare them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def bench_parser(module: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for `python -m ops.bench.MODULE`, which refuses options that it does not know."""
    return argparse.ArgumentParser(
        f"python -m ops.bench.{module}",
        description=description,
        epilog=epilog,
        formatter_class=_Help,
        allow_abbrev=False,
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = not isinstance(action.default, list) and action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help or ''} (default: %(default)s)" if has_default else action.help


def positive(text: str) -> int:
    """Read a count of at least 1."""
    try:
        if (count := int(text)) >= 1:
            return count
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def writable(text: str) -> Path:
    """Read the name of a file, which can be written: that is known before anything is measured."""
    file = Path(text)
    if not file.parent.is_dir() or file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: give a file in a directory that you may write to")
    return file


def add_list(
    parser: argparse.ArgumentParser,
    option: str,
    read: Callable[[str], Value],
    default: list[Value] | None,
    help: str,
    allowed: Collection[Value] = (),
) -> None:
    """Add an option of several values, separated by commas or spaces; `read` parses one, or raises ValueError."""

    def read_all(text: str) -> list[Value]:
        try:
            values = [read(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        for value in values:
            if allowed and value not in allowed:
                raise argparse.ArgumentTypeError(f"{value!r} is none of {_joined(allowed)}")
        return values

    text = f"{help}; of {_joined(allowed)}" if allowed else help
    metavar = option.lstrip("-").replace("-", "_").upper()
    parser.add_argument(
        option, nargs="+", type=read_all, action=_Flattened, default=default, metavar=metavar, help=text
    )


class _Flattened(argparse.Action):
    """Keeps the values of all its arguments as one list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, [value for part in values for value in part])


def _joined(values: Collection[object]) -> str:
    return ", ".join(map(str, values))


_LEAST_WIDTH = 8
_RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("msgspec", "nats-py", "uvloop", "httptools", "torch")


class ResultTable:
    """Prints rows below the names of their columns, and records them."""

    def __init__(self, benchmark: str, columns: Sequence[str] = (), module: str | None = None) -> None:
        self._benchmark = benchmark
        self._columns = columns
        self._command = " ".join([f"python -m ops.bench.{module or benchmark}", *sys.argv[1:]])
        self._widths: dict[str, int] = {}

    def add(self, row: Mapping[str, object], **others: object) -> None:
        """Print a row, and record it with what else is known of it."""
        self.add_all([row], **others)

    def add_all(self, rows: Sequence[Mapping[str, object]], **others: object) -> None:
        """Print rows, columns as wide as the first of them need, and record each with what else is known of all."""
        if not self._widths:
            for name in self._columns or rows[0]:
                self._widths[name] = max(len(name), _LEAST_WIDTH, *(len(_cell(row, name)) for row in rows))
            print("  ".join(f"{name:>{width}}" for name, width in self._widths.items()))
        for row in rows:
            print("  ".join(f"{_cell(row, name):>{width}}" for name, width in self._widths.items()), flush=True)
            append_record(self._benchmark, self._command, {**row, **others})


def _cell(row: Mapping[str, object], name: str) -> str:
    return "-" if row.get(name) is None else str(row[name])


def append_record(benchmark: str, command: str, row: Mapping[str, object]) -> None:
    """Append one row to the benchmark's file. Rows of one process and command are one run."""
    machine = {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.system()}
    process = {"machine": machine, "load_average": round(os.getloadavg()[0], 2), "process": os.getpid()}
    append_lines(_RESULTS / f"{benchmark}.jsonl", [{**origin(command, _PACKAGES), **process, **row}])


def append_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append rows to a file, whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as results:
        results.writelines(json.dumps(row) + "\n" for row in rows)


def origin(command: str, packages: Iterable[str]) -> dict[str, object]:
    """Return when, from which commit, with which versions and how something is measured."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        # None where this is no checkout.
        "commit": found.stdout.strip() or None,
        "versions": versions,
        "command": command,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
