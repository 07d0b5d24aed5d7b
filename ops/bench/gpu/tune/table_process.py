"""The process that tunes one table, and tables as files: a launch that breaks the device costs only its own table."""

from __future__ import annotations

import ast
import copy
import time
from pathlib import Path
from typing import Any

import torch

from kernels.gpu_config import GpuGeneration, gpu_of
from ops.bench.gpu.prepared_process import Json, serve_one_job
from ops.bench.gpu.timer import CudaTimer, Timer
from ops.bench.gpu.tune.choice import Choice, Tuning, choose
from ops.bench.gpu.tune.tables import ALL_TABLES, ROOT, TunedTable

_LINE_LENGTH = 120

Literal = Any


class TableFile:
    """The docstring and the assignments of one module."""

    def __init__(self, source: str) -> None:
        """Read a module.

        Raises:
            ValueError: It holds more than a docstring and assignments of literals.
        """
        docstring, *statements = ast.parse(source).body
        self._docstring = ast.get_source_segment(source, docstring)
        self.tables: dict[str, Literal] = {}
        self._heads: dict[str, str] = {}
        for statement in statements:
            if not isinstance(statement, ast.AnnAssign) or statement.value is None:
                raise ValueError(f"line {statement.lineno} is not `name: type = literal`: {ast.unparse(statement)}")
            name = ast.unparse(statement.target)
            self._heads[name] = f"{name}: {ast.unparse(statement.annotation)} = "
            self.tables[name] = ast.literal_eval(statement.value)

    @classmethod
    def read(cls, path: Path) -> TableFile:
        """Read a file."""
        return cls(path.read_text())

    def text(self) -> str:
        """Return the module as the project's formatter leaves it."""
        lines = [self._head_and_literal(name, value) for name, value in self.tables.items()]
        return f"{self._docstring}\n\n" + "\n".join(lines) + "\n"

    def _head_and_literal(self, name: str, value: Literal) -> str:
        return self._heads[name] + format_literal(value, 0, len(self._heads[name]))


def format_literal(value: Literal, indent: int, used: int) -> str:
    """Return a literal; a dictionary is on one line where it holds no other and fits, else has a line an entry.

    Args:
        value: Dictionaries, tuples, strings and numbers.
        indent: Columns before the line that the literal begins on.
        used: Columns of that line before the literal.
    """
    if not isinstance(value, dict):
        return _scalar(value)
    flat = "{" + ", ".join(f"{_scalar(key)}: {_scalar(item)}" for key, item in value.items()) + "}"
    is_flat = not any(isinstance(item, dict) for item in value.values())
    has_comma = indent > 0
    if is_flat and used + len(flat) + has_comma <= _LINE_LENGTH:
        return flat
    inner = indent + 4
    lines = ["{"]
    for key, item in value.items():
        head = f"{' ' * inner}{_scalar(key)}: "
        lines.append(f"{head}{format_literal(item, inner, len(head))},")
    return "\n".join([*lines, " " * indent + "}"])


def _scalar(value: Literal) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)


def run_job(job: Json) -> Json:
    """Tune the table that is named, and answer whether all its entries were decided."""
    deadline = time.monotonic() + job["limit_s"]
    device = torch.device("cuda", 0)
    [table] = [table for table in ALL_TABLES if table.name == job["table"]]
    measured_on = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    generation = gpu_of(device).generation
    return {"is_complete": tune(table, device, generation, CudaTimer(), Path(job["target"]), measured_on, deadline)}


def tune(
    table: TunedTable,
    device: torch.device,
    generation: GpuGeneration,
    timer: Timer,
    target: Path,
    measured_on: str,
    deadline: float,
) -> bool:
    """Decide the entries of a generation, and write each as soon as it is decided; return whether all were.

    Args:
        table: To tune.
        device: To measure on, which is of `generation`.
        generation: Whose entries are rewritten.
        timer: To measure with.
        target: Folder that the path of the table is below.
        measured_on: What is written down about it.
        deadline: On the monotonic clock; later entries stay as they are.
    """
    is_complete = True
    # An earlier table may have written the same file there already.
    path = target / table.path
    file = TableFile.read(path if path.exists() else ROOT / table.path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(label: str, entries: Literal, key: object, value: Literal) -> None:
        entries[key] = value
        file.tables["MEASURED"][f"{label} {generation.name}"] = measured_on
        path.write_text(file.text())

    for tuning in table.tunings:
        if time.monotonic() > deadline:
            print(f"{tuning.label}: out of time, stays as it is")
            is_complete = False
            continue
        of_table = file.tables[tuning.table]
        # The entries that it has taken so far.
        of_table.setdefault(generation.name, copy.deepcopy(of_table[GpuGeneration.HOPPER.name]))
        entries, key = (of_table, generation.name) if tuning.key is None else (of_table[generation.name], tuning.key)
        try:
            choice = choose(tuning, entries[key], device, timer)
        except RuntimeError as error:
            print(error, flush=True)
            is_complete = False
            continue
        print("\n".join(_lines(tuning, choice)), flush=True)
        write(tuning.label, entries, key, dict(choice.entry))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if table.derive is not None and time.monotonic() <= deadline:
        for name, value in table.derive(device, timer, file.tables[table.tunings[0].table][generation.name]).items():
            print(f"{name}: {value}")
            write(name, file.tables[name], generation.name, value)
    if path.exists():
        print(f"wrote {path}", flush=True)
    return is_complete


def _lines(tuning: Tuning, choice: Choice) -> list[str]:
    """Return the trials, the best first, those that are out last."""
    lines = [f"{tuning.label}: time over the best, then µs by problem"]
    for trial in sorted(choice.trials, key=lambda trial: trial.score):
        mark = "chosen" if trial.entry == choice.entry else "present" if trial is choice.trials[0] else ""
        entry = " ".join(f"{name}={value}" for name, value in trial.entry.items())
        times = " ".join(f"{seconds * 1e6:.1f}" for seconds in trial.seconds)
        lines.append(f"  {mark:<8}{trial.score:>7.3f}  {entry}: {trial.failure or times}")
    return lines


if __name__ == "__main__":
    serve_one_job(run_job)
