"""Adapters (LoRA) beside plain decoding on this machine's CPU: computing of a step, and of prompts.

Run as `python -m ops.bench.adapters`. The engine alone serves the demo model, or `--model`, in turns: an engine that
knows no adapters, one that has as many as the batch but whose sequences have none, and one whose sequences have an
adapter each, of all linear layers. Times are those that one thread computes, which other processes lengthen less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Values
from pathlib import Path
from statistics import median

import torch

from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.adapters import EMBEDDING, HEAD, AdaptedMatrix, AdapterTargets
from kernels.low_rank import LowRank, LowRankPart
from ops.bench.options import add_list, bench_parser, positive
from ops.bench.record import ResultTable
from ops.bench.stepping import SteppedEngine, engine_of
from ops.stack.config import DEMO_MODEL

WITHOUT, IDLE, ADAPTED = "without", "idle", "adapted"
PROMPT_TOKENS = 64
STEPS = 30
_BLOCK_SIZE = 16


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


class Bench:
    """Owns an engine for each kind."""

    def __init__(self, model: Path, batch: int, rank: int, dtype: str) -> None:
        self._batch = batch
        self._engines: dict[str, SteppedEngine] = {}
        for kind in (WITHOUT, IDLE, ADAPTED):
            config = RunnerConfig(
                model,
                dtype=dtype,
                block_size=_BLOCK_SIZE,
                num_blocks=batch * -(-(PROMPT_TOKENS + STEPS + 10) // _BLOCK_SIZE),
                max_num_seqs=batch,
                max_model_len=PROMPT_TOKENS + STEPS + 10,
                num_threads=1,
                max_loras=0 if kind == WITHOUT else batch,
            )
            runner = build_runner(config)
            if (targets := runner.model.adapters) is not None:
                for slot in range(batch):
                    adapter = random_adapter(targets, rank, slot)
                    most = max(low_rank.rank for low_rank in adapter.values())
                    targets.place(slot, targets.pack(adapter), most)
            self._engines[kind] = engine_of(runner, max_num_seqs=batch, has_prefix_cache=False)

    def run(self, kind: str) -> tuple[float, float]:
        """Serve a batch of one kind; return the seconds of computing of its prompts, and of a step."""
        engine, sequences = self._engines[kind], []
        for slot in range(self._batch):
            sequence = engine.add(engine.random_prompt(PROMPT_TOKENS), STEPS + 8)
            sequence.adapter = slot if kind == ADAPTED else None
            sequences.append(sequence)
        begun = time.thread_time()
        engine.prefill(sequences)
        prefilled = time.thread_time()
        engine.step_seconds(STEPS)
        stepped = time.thread_time()
        engine.abort(sequences)
        return prefilled - begun, (stepped - prefilled) / STEPS


def measure(bench: Bench, batch: int, rank: int, rounds: int, table: ResultTable) -> None:
    """Measure all kinds in turns, print them beside the engine without adapters, and record them."""
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (WITHOUT, IDLE, ADAPTED)}
    for _ in range(rounds):
        for kind, times in taken.items():
            times.append(bench.run(kind))
    for kind, times in taken.items():
        pairs = list(zip(times, taken[WITHOUT], strict=True))
        table.add(
            {
                "batch": batch,
                "rank": rank,
                "kind": kind,
                "step_ms": round(median(step for _, step in times) * 1e3, 3),
                "prompts_ms": round(median(prompts for prompts, _ in times) * 1e3, 3),
                "decode_speed": round(median(plain / step for (_, step), (_, plain) in pairs), 3),
                "prompt_speed": round(median(plain / prompts for (prompts, _), (plain, _) in pairs), 3),
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
        bench = Bench(options.model, batch, options.rank, options.dtype)
        measure(bench, batch, options.rank, options.rounds, table)


if __name__ == "__main__":
    main()
