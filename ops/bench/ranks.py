"""A model that is divided among ranks beside the same model in one process, on this machine's CPU, in turns.

Run as `python -m ops.bench.ranks [--shapes 160m] [--num-ranks 2]`. One process has as many threads as all ranks
together have, which is one each. The table is printed, and appended to `results/ranks.jsonl`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import torch

from ops.bench.comparison import OURS, add_load_options, add_shapes, compare, loads_of, model_of
from ops.bench.engine import EngineBench, Load, Measurement
from ops.bench.make_model import SHAPES
from ops.bench.record import ResultTable, bench_parser, positive

_BUDGET, _BLOCK_SIZE = 512, 16
_COLUMNS = ("model", "dtype", "engine", "batch", "decode_tokens_per_s", "of_best_peer", "prefill_tokens_per_s")
ONE = "one-process"


def measure(bench: EngineBench, threads: int, loads: Sequence[Load], number: int) -> dict[int, Measurement]:
    """Serve each load once, with the threads of this engine; `number` is that of the round."""
    torch.set_num_threads(threads)
    return {load.batch: bench.measure(load) for load in loads}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and record."""
    parser = bench_parser("ranks", __doc__)
    add_shapes(parser)
    add_load_options(parser)
    parser.add_argument("--num-ranks", type=positive, default=2, help="processes, of one thread each")
    parser.add_argument("--dtype", default="float32", help="what both compute in")
    options = parser.parse_args(arguments)
    loads, size = loads_of(options), options.num_ranks
    largest = Load(max(load.batch for load in loads), options.prompt, options.new)
    settings = {"dtype": options.dtype, "max_load": largest, "token_budget": _BUDGET, "block_size": _BLOCK_SIZE}
    table = ResultTable("ranks", _COLUMNS)
    for shape in options.shapes:
        with model_of(SHAPES[shape]) as model:
            one = EngineBench(model, num_threads=size, **settings)
            divided = EngineBench(model, num_threads=1, num_ranks=size, **settings)
            engines = {OURS: partial(measure, divided, 1, loads), ONE: partial(measure, one, size, loads)}
            asked = {"model": shape, "dtype": options.dtype, "ranks": size, "rounds": options.rounds}
            with contextlib.closing(divided):
                compare(table, engines, options, required=engines, **asked)


if __name__ == "__main__":
    main()
