"""Our engine beside others on this machine's CPU: same model, precision, prompt and batch, in one run.

Run as `make bench-engine` or `python -m ops.bench.engine_compare`. Builds the models of `make_model` in a temporary
folder, measures all engines one after another, in several rounds, prints the medians with ratios to the best peer, and
appends them to `results/engine.jsonl`. `--shapes 1b --rounds 1` takes a model of a billion parameters with a tied head.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from ops.bench.comparison import (
    OURS,
    add_options,
    loads_of,
    measure_in_turn,
    model_of,
    print_missing,
    print_rates,
    ratios,
)
from ops.bench.engine import Measurement
from ops.bench.make_model import SHAPES, Size
from ops.bench.peers.engines import Task, measure_ours, peers
from ops.bench.record import append_record, command_line

Measure = Callable[[Task], dict[int, Measurement]]


Results = dict[tuple[str, int], Measurement]


def measure_all(engines: dict[str, Measure], task: Task, rounds: int) -> tuple[Results, dict[str, str]]:
    """Measure every engine in every round; return medians by engine and batch size, and why engines are missing."""

    def in_round(measure: Measure, number: int) -> dict[int, Measurement]:
        return measure(task)

    return measure_in_turn({name: partial(in_round, call) for name, call in engines.items()}, rounds)


def print_table(size: Size, task: Task, results: Results) -> None:
    """Print decode and prefill rates, an engine a line."""
    load, last = task.loads[0], max((batch for _, batch in results), default=0)
    print(f"\n{size.value}, bfloat16, {task.num_threads} threads, prompt {load.prompt}, {load.new} decode steps")
    prefills = {key: one.prefill_rate for key, one in results.items() if key[1] == last}
    notes = {name: f"   prefill {rate:.0f} tok/s at B{last}" for (name, _), rate in prefills.items()}
    print_rates("decode tok/s", {key: one.decode_rate for key, one in results.items()}, notes)
    if ratio := ratios(prefills).get(last):
        print(f"prefill of best peer {ratio:.2f}x")
    fractions = [one.bandwidth_fraction for (name, _), one in results.items() if name == OURS]
    cells = "".join(f"{fraction:>9.0%}" if fraction is not None else f"{'-':>9}" for fraction in fractions)
    print(f"{'of fastest read':<16}{cells}")


def record(size: Size, task: Task, results: Results, missing: dict[str, str], versions: dict[str, str]) -> None:
    """Append the results, a line an engine and batch size."""
    load = task.loads[0]
    for (name, batch), measured in results.items():
        fields: dict[str, object] = {
            "model": size.value,
            "dtype": "bfloat16",
            "threads": task.num_threads,
            "engine": name,
            "engine_version": versions.get(name),
            "batch": batch,
            "prompt": load.prompt,
            "new": load.new,
            "prefill_tokens_per_s": round(measured.prefill_rate, 1),
            "decode_tokens_per_s": round(measured.decode_rate, 1),
            "not_available": missing,
        }
        if measured.bandwidth_fraction is not None:
            fields["bandwidth_fraction"] = round(measured.bandwidth_fraction, 3)
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
        with model_of(SHAPES[size]) as model:
            task = Task(model, loads_of(options), options.num_threads)
            results, missing = measure_all(engines, task, options.rounds)
        print_table(size, task, results)
        print_missing(missing)
        record(size, task, results, missing, {peer.name: peer.version() for peer in found if peer.name not in missing})


if __name__ == "__main__":
    main()
