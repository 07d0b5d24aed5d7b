"""Adapters (LoRA) beside plain decoding on this machine's CPU: computing of a step, and of prompts.

Run as `python -m ops.bench.adapters`. The engine alone serves the demo model, or `--model`, in turns: an engine that
knows no adapters, one that has as many as the batch but whose sequences have none, and one whose sequences have an
adapter each, of all linear layers. Times are those that one thread computes, which other processes lengthen less.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence as Values
from functools import partial
from pathlib import Path
from statistics import median

import torch

from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.adapters import EMBEDDING, HEAD, AdaptedMatrix, AdapterTargets
from kernels.low_rank import LowRank, LowRankPart
from ops.bench.comparison import in_turns, median_ratio
from ops.bench.record import ResultTable, add_list, bench_parser, positive
from ops.bench.stepping import SteppedEngine, make_engine
from ops.stack.config import DEMO_MODEL

WITHOUT, IDLE, ADAPTED = KINDS = ("without", "idle", "adapted")
PROMPT_TOKENS = 64
STEPS = 30


def random_adapter(targets: AdapterTargets, rank: int, seed: int) -> dict[str, LowRank]:
    """Return an adapter of all linear layers, whose products are small."""
    generator = torch.Generator().manual_seed(seed)

    def part(matrix: AdaptedMatrix, index: int) -> LowRankPart:
        first = sum(matrix.rows[:index])
        down = torch.randn(rank, matrix.columns, generator=generator).bfloat16()
        up = torch.randn(matrix.rows[index], rank, generator=generator).bfloat16()
        return LowRankPart(down, up, 1e-4, torch.arange(first, first + matrix.rows[index]))

    return {
        name: LowRank(tuple(part(matrix, i) for i in range(len(matrix.rows))), matrix.shape, matrix.is_gated)
        for name, matrix in targets.matrices.items()
        if name not in (EMBEDDING, HEAD)
    }


def engine_for(kind: str, model: Path, batch: int, rank: int, dtype: str) -> SteppedEngine:
    """Load the model for a batch of one kind."""
    max_len, max_loras = PROMPT_TOKENS + STEPS + 10, 0 if kind == WITHOUT else batch
    config = RunnerConfig(model, dtype, max_num_seqs=batch, max_model_len=max_len, num_threads=1, max_loras=max_loras)
    engine = make_engine(config)
    if (targets := engine.runner.model.adapters) is not None:
        for slot in range(batch):
            adapter = random_adapter(targets, rank, slot)
            targets.place(slot, targets.pack(adapter), max(low_rank.rank for low_rank in adapter.values()))
    return engine


def serve(engine: SteppedEngine, batch: int, *, is_adapted: bool) -> tuple[float, float]:
    """Serve a batch; return the seconds of computing of its prompts, and of a step."""
    sequences = [engine.add(engine.random_prompt(PROMPT_TOKENS), STEPS + 8) for _ in range(batch)]
    for slot, sequence in enumerate(sequences):
        sequence.adapter = slot if is_adapted else None
    begun = time.thread_time()
    engine.prefill(sequences)
    prefilled = time.thread_time()
    engine.step_seconds(STEPS)
    stepped = time.thread_time()
    engine.abort(sequences)
    return prefilled - begun, (stepped - prefilled) / STEPS


def measure(options: argparse.Namespace, batch: int, table: ResultTable) -> None:
    """Measure all kinds in turns, print them beside the engine without adapters, and record them."""
    engines = {kind: engine_for(kind, options.model, batch, options.rank, options.dtype) for kind in KINDS}
    # As workers do once they have loaded.
    gc.collect()
    gc.freeze()
    measures = {kind: partial(serve, engine, batch, is_adapted=kind == ADAPTED) for kind, engine in engines.items()}
    taken = {kind: list(zip(*times, strict=True)) for kind, times in in_turns(measures, options.rounds).items()}
    for kind, (prompts, steps) in taken.items():
        plain_prompts, plain_steps = taken[WITHOUT]
        table.add(
            {
                "batch": batch,
                "rank": options.rank,
                "kind": kind,
                "step_ms": round(median(steps) * 1e3, 3),
                "prompts_ms": round(median(prompts) * 1e3, 3),
                "decode_speed": median_ratio(plain_steps, steps),
                "prompt_speed": median_ratio(plain_prompts, prompts),
            }
        )


def main(arguments: Values[str] | None = None) -> None:
    """Print the table and append its rows to the results."""
    parser = bench_parser("adapters", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="directory of the model")
    add_list(parser, "--batch", positive, [1, 32], "sequences, and adapters, at once: 1,32")
    parser.add_argument("--rank", type=positive, default=8, help="of all adapters")
    parser.add_argument("--rounds", type=positive, default=15, help="in which each kind has its turn")
    parser.add_argument("--dtype", default="auto", help="what the model computes in")
    options = parser.parse_args(arguments)
    table = ResultTable("adapters")
    for batch in options.batch:
        measure(options, batch, table)


if __name__ == "__main__":
    main()
