"""Our engine beside others on this machine's CPU: same model, precision, prompt and batch, in one run.

Run as `make bench-engine` or `python -m ops.bench.engine_compare`. Builds the models of `make_model` in a temporary
folder, measures all engines one after another, in several rounds, prints the medians with ratios to the best peer, and
appends them to `results/engine.jsonl`. `--shapes 1b --rounds 1` takes a model of a billion parameters with a tied head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ops.bench.comparison import OURS, add_load_options, add_shapes, compare, loads_of, model_of
from ops.bench.make_model import SHAPES
from ops.bench.peers.engines import Task, measure_ours, peers
from ops.bench.record import ResultTable, add_list, bench_parser

_RATES = ("decode_tokens_per_s", "of_best_peer", "prefill_tokens_per_s", "bandwidth_fraction")
_COLUMNS = ("model", "engine", "batch", *_RATES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare on every shape."""
    parser = bench_parser("engine_compare", __doc__)
    add_shapes(parser)
    add_list(parser, "--peers", str, None, "only these, separated by commas")
    add_load_options(parser)
    options = parser.parse_args(arguments)
    found = [peer for peer in peers(options.cache) if options.peers is None or peer.name in options.peers]
    engines = {OURS: measure_ours} | {peer.name: peer.run for peer in found}
    versions = {peer.name: peer.version for peer in found}
    table = ResultTable("engine", _COLUMNS, "engine_compare")
    for shape in options.shapes:
        with model_of(SHAPES[shape]) as model:
            task = Task(model, loads_of(options), options.num_threads)
            measures = {name: partial(measure, task) for name, measure in engines.items()}
            asked = {"model": shape, "dtype": "bfloat16", "threads": options.num_threads}
            compare(table, measures, options, versions, (OURS, *(options.peers or ())), **asked)


if __name__ == "__main__":
    main()
