"""Our engine beside others on this machine's CPU: same model, precision, prompt and batch, in one run.

Run as `make bench-engine` or `python -m ops.bench.engine_compare`. Builds the models of `make_model` in a temporary
folder, measures all engines one after another, in several rounds, prints the medians with ratios to the best peer, and
appends them to `results/engine.jsonl`. `--shapes 1b --rounds 1` takes a model of a billion parameters with a tied head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ops.bench.comparison import OURS, add_load_options, add_rows, add_shapes, loads_of, measure_in_turn, model_of
from ops.bench.engine import Measurement
from ops.bench.make_model import SHAPES
from ops.bench.options import add_list, bench_parser
from ops.bench.peers.engines import Task, measure_ours, peers
from ops.bench.record import ResultTable, command_line

Measure = Callable[[Task], dict[int, Measurement]]
Results = dict[tuple[str, int], Measurement]
_RATES = ("decode_tokens_per_s", "of_best_peer", "prefill_tokens_per_s", "bandwidth_fraction")
_COLUMNS = ("model", "engine", "batch", *_RATES)


def measure_all(engines: dict[str, Measure], task: Task, rounds: int) -> tuple[Results, dict[str, str]]:
    """Measure every engine in every round; return medians by engine and batch size, and why engines are missing."""

    def in_round(measure: Measure, number: int) -> dict[int, Measurement]:
        return measure(task)

    return measure_in_turn({name: partial(in_round, call) for name, call in engines.items()}, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare on every shape."""
    parser = bench_parser("engine_compare", __doc__)
    add_shapes(parser)
    add_list(parser, "--peers", str, None, "only these, separated by commas")
    add_load_options(parser)
    options = parser.parse_args(arguments)
    found = [peer for peer in peers(options.cache) if options.peers is None or peer.name in options.peers]
    engines = {OURS: measure_ours} | {peer.name: peer.measure for peer in found}
    table = ResultTable("engine", _COLUMNS, command_line("engine_compare"))
    for shape in options.shapes:
        with model_of(SHAPES[shape]) as model:
            task = Task(model, loads_of(options), options.num_threads)
            results, missing = measure_all(engines, task, options.rounds)
        versions = {peer.name: peer.version() for peer in found if peer.name not in missing}
        asked = {"threads": options.num_threads, "prompt": options.prompt, "new": options.new}
        required = (OURS, *(options.peers or ()))
        add_rows(table, results, versions, missing, required, model=shape, dtype="bfloat16", **asked)


if __name__ == "__main__":
    main()
