"""What a prefix costs that comes back from the host's memory or from files, and what keeping it costs streams.

Run as `python -m ops.bench.kv_tiers [--model DIR | --shape 15m] [--prompt 8192]`. Engine, scheduler and runner are
real, without queue and tokenizer, on the CPU. All engines share a runner, and take turns:

- restored: the time to the first token of a prompt whose beginning is in a tier alone, beside that of computing it. A
  prompt is served, others overwrite it, and it comes again. For files the engine is a new one, as after a restart;
- beside streams: the time between tokens of streams while prompts are computed, with tiers (all their blocks are
  copied, and written to files) and without.

The table is printed, and appended to `results/kv_tiers.jsonl`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Values
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.tiers.block_files import BlockFiles
from gpu_worker.execution.tiers.block_tiers import BlockTiers
from gpu_worker.execution.tiers.directory import DirectoryStore
from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.host_tier import HostTier
from ops.bench.comparison import add_model, model_of
from ops.bench.make_model import SHAPES, Size
from ops.bench.options import bench_parser
from ops.bench.record import ResultTable
from ops.bench.stepping import SteppedEngine

BLOCK_SIZE = 16
TOKEN_BUDGET = 512
NUM_STREAMS = 4
_SETTLE_S = 30.0


class Bench:
    """A runner, and engines over it that keep nothing of one another."""

    def __init__(self, runner: TorchModelRunner, vocab_size: int, host_bytes: int) -> None:
        self.runner = runner
        self._vocabulary = range(3, vocab_size)
        self._host_bytes = host_bytes

    def engine(
        self, directory: Path | None = None, *, has_tiers: bool = True
    ) -> tuple[SteppedEngine, BlockFiles | None]:
        """Make an engine, with files where a directory is given; its caches are empty."""
        tiers, files = None, None
        if has_tiers:
            groups = self.runner.block_contents
            host = HostTier(groups, self._host_bytes)
            if directory is not None:
                maker = Maker(b"w" * 32, tuple(bytes([number]) * 32 for number, _ in enumerate(groups)))
                tokens = [BLOCK_SIZE] * len(groups)
                files = BlockFiles(DirectoryStore(directory), groups, tokens, 1 << 40, host, lambda: maker)
                files.is_ready.wait()
            tiers = BlockTiers(groups, BLOCK_SIZE, host, files)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=self.runner.num_blocks,
            max_num_seqs=NUM_STREAMS + 2,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_model_len=self.runner.max_model_len,
            windows=self.runner.windows,
        )
        self.runner.clear()
        return SteppedEngine(Engine(Scheduler(config, tiers=tiers), self.runner), self._vocabulary), files


def restored_s(
    bench: Bench, prompt: int, rounds: int, directory: Path | None
) -> tuple[list[float], list[float], float]:
    """Return seconds to the first token of computing and of restoring, in pairs, and the share that was restored."""
    cold, restored, hits = [], [], 0
    for number in range(rounds):
        folder = None if directory is None else directory / str(number)
        engine, files = bench.engine(folder)
        text = engine.random_prompt(prompt)
        cold.append(engine.serve_s([text], 1))
        if files is not None:
            _settle(lambda files=files: files.stored_bytes)  # type: ignore[misc]
            engine, _ = bench.engine(folder)
        else:
            engine.serve_s([engine.random_prompt(prompt)], 1)
        before = engine.engine.stats.num_prefix_hits
        restored.append(engine.serve_s([text], 1))
        hits += engine.engine.stats.num_prefix_hits - before
    return cold, restored, hits / (rounds * prompt)


def stream_itl_s(
    bench: Bench, prompt: int, rounds: int, directory: Path, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Return the mean seconds between tokens of streams beside prompts, in pairs: with tiers, and without.

    By the `clock`: the time, or that of the engine's thread on a core, which others on the machine do not disturb.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for has_tiers in (True, False) if number % 2 else (False, True):
            engine, _ = bench.engine(Path(tempfile.mkdtemp(dir=directory)) if has_tiers else None, has_tiers=has_tiers)
            streams = [
                engine.add(engine.random_prompt(32), bench.runner.max_model_len - 32) for _ in range(NUM_STREAMS)
            ]
            engine.prefill(streams)
            before = sum(stream.num_output_tokens for stream in streams)
            started = clock()
            for _ in range(3):
                engine.prefill([engine.add(engine.random_prompt(prompt), 2)])
            elapsed = clock() - started
            num_tokens = (sum(stream.num_output_tokens for stream in streams) - before) / NUM_STREAMS
            if number:
                seconds[has_tiers].append(elapsed / num_tokens)
            for stream in streams:
                engine.engine.abort(stream.id)
            engine.run()
    return seconds[True], seconds[False]


def _settle(count: Callable[[], int]) -> None:
    """Wait until nothing more is written."""
    deadline, previous = time.monotonic() + _SETTLE_S, -1
    while count() != previous and time.monotonic() < deadline:
        previous = count()
        time.sleep(0.3)


def _ratios(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def _restored_row(name: str, prompt: int, result: tuple[list[float], list[float], float]) -> dict[str, object]:
    cold, restored, share = result
    return {
        "measurement": f"restored from {name}",
        "prompt": prompt,
        "rounds": len(cold),
        "hit_share": round(share, 4),
        "base_ms": round(statistics.median(cold) * 1e3, 2),
        "tiers_ms": round(statistics.median(restored) * 1e3, 2),
        "ratio": round(_ratios(restored, cold), 4),
    }


def main(arguments: Values[str] | None = None) -> None:
    """Measure, print and record."""
    parser = bench_parser("kv_tiers", __doc__)
    add_model(parser, "directory of a model", shape=Size.M15)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompts that are restored")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each measurement")
    parser.add_argument("--num-threads", type=int, help="of CPU operations; as many as a worker takes if not given")
    options = parser.parse_args(arguments)
    longest = options.prompt + 16
    shape = replace(SHAPES[options.shape], max_len=longest)
    with (
        nullcontext(options.model) if options.model is not None else model_of(shape) as model,
        tempfile.TemporaryDirectory() as directory,
    ):
        num_blocks = (longest + NUM_STREAMS * 600) // BLOCK_SIZE + 8
        config = RunnerConfig(
            model, num_blocks=num_blocks, max_num_seqs=8, max_model_len=longest, num_threads=options.num_threads
        )
        runner = build_runner(replace(config, max_num_batched_tokens=TOKEN_BUDGET))
        row_bytes = sum(group.row_bytes * group.num_blocks for group in runner.block_contents)
        bench = Bench(runner, runner.model_config.vocab_size, 3 * row_bytes)
        rows = [
            _restored_row("host", options.prompt, restored_s(bench, options.prompt, options.rounds, None)),
            _restored_row("files", options.prompt, restored_s(bench, options.prompt, options.rounds, Path(directory))),
        ]
        for what, clock in (("time", time.perf_counter), ("processor time", time.thread_time)):
            with_tiers, without = stream_itl_s(bench, options.prompt // 8, options.rounds, Path(directory), clock)
            rows.append(
                {
                    "measurement": f"streams beside offloading, {what}",
                    "prompt": options.prompt // 8,
                    "rounds": len(without),
                    "base_ms": round(statistics.median(without) * 1e3, 3),
                    "tiers_ms": round(statistics.median(with_tiers) * 1e3, 3),
                    "ratio": round(_ratios(with_tiers, without), 4),
                }
            )
        name = options.shape if options.model is None else options.model.name
        dtype = str(runner.dtype).removeprefix("torch.")
        block_bytes = [group.row_bytes for group in runner.block_contents]
    common = {"model": name, "dtype": dtype, "threads": torch.get_num_threads(), "block_bytes": block_bytes}
    ResultTable("kv_tiers").add_all(rows, **common)


if __name__ == "__main__":
    main()
