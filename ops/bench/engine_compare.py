"""Our engine beside others on this machine's CPU: same model, precision, prompt and batch, in one run.

Run as `make bench-engine` or `python -m ops.bench.engine_compare`. Builds the models of `make_model` in a temporary
folder, measures all engines one after another, in several rounds so that they share the machine's good and bad moments,
prints the medians with ratios to the best peer, and appends them to `results/engine.jsonl`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ops.bench.engine import Load, Measurement
from ops.bench.engine_peers import Peer, PeerUnavailableError, Task, measure_ours, peers
from ops.bench.make_model import SHAPES, Size, make_model
from ops.bench.record import append_record

OURS = "headrace"
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
    results: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    missing: dict[str, str] = {}
    for number in range(rounds):
        for name, measure in engines.items():
            if name in missing:
                continue
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                for batch, measurement in measure(task).items():
                    results[name, batch].append(measurement)
            except PeerUnavailableError as error:
                missing[name] = str(error)
    rows = [
        Row(
            name,
            batch,
            statistics.median(measurement.prefill_rate for measurement in measurements),
            statistics.median(measurement.decode_rate for measurement in measurements),
            _median_fraction(measurements),
        )
        for (name, batch), measurements in results.items()
        if name not in missing
    ]
    return rows, missing


def _median_fraction(measurements: list[Measurement]) -> float | None:
    known = [m.bandwidth_fraction for m in measurements if m.bandwidth_fraction is not None]
    return statistics.median(known) if known else None


def ratios(rows: list[Row]) -> dict[int, tuple[float | None, float | None]]:
    """Return, for each batch size, our prefill and decode rates over those of the best peer."""

    def ratio(batch: int, rate: Callable[[Row], float]) -> float | None:
        ours = [rate(row) for row in rows if row.batch == batch and row.engine == OURS]
        theirs = [rate(row) for row in rows if row.batch == batch and row.engine != OURS]
        return ours[0] / max(theirs) if ours and theirs else None

    return {
        batch: (ratio(batch, lambda row: row.prefill_rate), ratio(batch, lambda row: row.decode_rate))
        for batch in sorted({row.batch for row in rows})
    }


def print_table(size: Size, task: Task, rows: list[Row], missing: dict[str, str]) -> None:
    """Print decode and prefill rates, an engine a line."""
    load = task.loads[0]
    print(f"\n{size.value}, bfloat16, {task.num_threads} threads, prompt {load.prompt}, {load.new} decode steps")
    batches = sorted({row.batch for row in rows})
    heads = [f"B{batch}" for batch in batches]
    print(f"{'decode tok/s':<14}" + "".join(f"{head:>9}" for head in heads) + f"{'prefill tok/s, ' + heads[-1]:>23}")
    for name in dict.fromkeys(row.engine for row in rows):
        rates = {row.batch: row for row in rows if row.engine == name}
        cells = "".join(f"{rates[batch].decode_rate:>9.0f}" if batch in rates else f"{'-':>9}" for batch in batches)
        last = rates.get(batches[-1])
        print(f"{name:<14}{cells}" + (f"{last.prefill_rate:>23.0f}" if last else ""))
    compared = ratios(rows)
    cells = "".join(f"{decode:>8.2f}x" if decode else f"{'-':>9}" for _, decode in compared.values())
    prefill = compared[batches[-1]][0]
    print(f"{'of best peer':<14}{cells}" + (f"{prefill:>22.2f}x" if prefill else ""))
    fractions = {row.batch: row.bandwidth_fraction for row in rows if row.engine == OURS}
    cells = "".join(f"{fraction:>9.0%}" if fraction is not None else f"{'-':>9}" for fraction in fractions.values())
    print(f"{'of bandwidth':<14}{cells}")
    for name, reason in missing.items():
        print(f"{name}: not available: {reason}")


def record(size: Size, task: Task, rows: list[Row], missing: dict[str, str], versions: dict[str, str]) -> None:
    """Append the results, a line an engine and batch size."""
    command = "python -m ops.bench.engine_compare " + " ".join(sys.argv[1:])
    for row in rows:
        load = task.loads[0]
        append_record(
            "engine",
            command.strip(),
            {
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
            | ({} if row.bandwidth_fraction is None else {"bandwidth_fraction": round(row.bandwidth_fraction, 3)}),
        )


def _engines(found: list[Peer], only: str | None) -> dict[str, Measure]:
    wanted = None if only is None else set(only.split(","))
    return {OURS: measure_ours} | {peer.name: peer.measure for peer in found if wanted is None or peer.name in wanted}


def main() -> None:
    """Compare on every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="15m,160m", help="of 15m, 160m")
    parser.add_argument("--batch", default="1,4,16,32")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", help="only these, separated by commas")
    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "bench"
    parser.add_argument("--cache", type=Path, default=default_cache, help="where the peers are installed")
    arguments = parser.parse_args()
    found = peers(arguments.cache)
    engines = _engines(found, arguments.peers)
    loads = [Load(int(batch), arguments.prompt, arguments.new) for batch in arguments.batch.split(",")]
    for size in map(Size, arguments.shapes.split(",")):
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            make_model(SHAPES[size], Path(folder))
            task = Task(Path(folder), loads, arguments.num_threads)
            rows, missing = measure_all(engines, task, arguments.rounds)
        versions = {peer.name: peer.version() for peer in found if peer.name in engines and peer.name not in missing}
        print_table(size, task, rows, missing)
        record(size, task, rows, missing, versions)


if __name__ == "__main__":
    main()
