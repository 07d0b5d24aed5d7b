"""Our engine beside others on this machine's CPU: same model, precision, prompt and batch, in one run.

Run as `make bench-engine` or `python -m ops.bench.engine_compare`. Builds the models of `make_model` in a temporary
folder, measures all engines one after another, in several rounds, prints the medians with ratios to the best peer, and
appends them to `results/engine.jsonl`. `--shapes 1b --rounds 1` takes a model of a billion parameters with a tied head.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ops.bench.comparison import (
    OURS,
    add_options,
    command_line,
    loads_of,
    measure_in_turn,
    print_missing,
    print_rates,
    ratios,
)
from ops.bench.engine import Measurement
from ops.bench.make_model import SHAPES, Size, make_model
from ops.bench.peers.engines import Task, measure_ours, peers
from ops.bench.record import append_record

Measure = Callable[[Task], dict[int, Measurement]]


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of one engine at one batch size."""

    engine: str
    batch: int
    prefill_rate: float
    decode_rate: float
    bandwidth_fraction: float | None = None


def measure_all(engines: dict[str, Measure], task: Task, rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Measure every engine in every round; return medians, and why engines are missing."""

    def in_round(measure: Measure, number: int) -> dict[int, Measurement]:
        return measure(task)

    results, missing = measure_in_turn({name: partial(in_round, call) for name, call in engines.items()}, rounds)
    return [Row(name, batch, *_medians(measured)) for (name, batch), measured in results.items()], missing


def _medians(measured: list[Measurement]) -> tuple[float, float, float | None]:
    known = [one.bandwidth_fraction for one in measured if one.bandwidth_fraction is not None]
    return (
        statistics.median(one.prefill_rate for one in measured),
        statistics.median(one.decode_rate for one in measured),
        statistics.median(known) if known else None,
    )


def print_table(size: Size, task: Task, rows: list[Row]) -> None:
    """Print decode and prefill rates, an engine a line."""
    load, last = task.loads[0], max((row.batch for row in rows), default=0)
    print(f"\n{size.value}, bfloat16, {task.num_threads} threads, prompt {load.prompt}, {load.new} decode steps")
    prefills = {(row.engine, row.batch): row.prefill_rate for row in rows if row.batch == last}
    notes = {name: f"   prefill {rate:.0f} tok/s at B{last}" for (name, _), rate in prefills.items()}
    print_rates("decode tok/s", {(row.engine, row.batch): row.decode_rate for row in rows}, notes)
    if ratio := ratios(prefills).get(last):
        print(f"prefill of best peer {ratio:.2f}x")
    fractions = [row.bandwidth_fraction for row in rows if row.engine == OURS]
    cells = "".join(f"{fraction:>9.0%}" if fraction is not None else f"{'-':>9}" for fraction in fractions)
    print(f"{'of bandwidth':<16}{cells}")


def record(size: Size, task: Task, rows: list[Row], missing: dict[str, str], versions: dict[str, str]) -> None:
    """Append the results, a line an engine and batch size."""
    load = task.loads[0]
    for row in rows:
        fields: dict[str, object] = {
            "model": size.value,
            "dtype": "bfloat16",
            "threads": task.num_threads,
            "engine": row.engine,
            "engine_version": versions.get(row.engine),
            "batch": row.batch,
            "prompt": load.prompt,
            "new": load.new,
            "prefill_tokens_per_s": round(row.prefill_rate, 1),
            "decode_tokens_per_s": round(row.decode_rate, 1),
            "not_available": missing,
        }
        if row.bandwidth_fraction is not None:
            fields["bandwidth_fraction"] = round(row.bandwidth_fraction, 3)
        append_record("engine", command_line("engine_compare"), fields)


def main() -> None:
    """Compare on every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="15m,160m", help=f"of {', '.join(size.value for size in Size)}")
    parser.add_argument("--peers", help="only these, separated by commas")
    add_options(parser)
    options = parser.parse_args()
    wanted = None if options.peers is None else options.peers.split(",")
    found = [peer for peer in peers(options.cache) if wanted is None or peer.name in wanted]
    engines = {OURS: measure_ours} | {peer.name: peer.measure for peer in found}
    for size in map(Size, options.shapes.split(",")):
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            make_model(SHAPES[size], Path(folder))
            task = Task(Path(folder), loads_of(options), options.num_threads)
            rows, missing = measure_all(engines, task, options.rounds)
        print_table(size, task, rows)
        print_missing(missing)
        record(size, task, rows, missing, {peer.name: peer.version() for peer in found if peer.name not in missing})


if __name__ == "__main__":
    main()
