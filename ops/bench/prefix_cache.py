"""What the prefix cache costs where nothing hits, and what it saves where nearly everything does.

Run as `python -m ops.bench.prefix_cache [--model DIR | --shape 15m] [--prompt 8192]`. Engine, scheduler and runner are
real, without queue and tokenizer, on the CPU. Two engines, one with the cache and one without, share a runner and take
the same distinct prompts in turn; time to first token is measured for a new prompt and for one that differs
from it in its last hundredth. The table is printed, and appended to `results/prefix_cache.jsonl`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Values
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.simulated_runner import SimulatedRunner
from ops.bench.comparison import add_model, model_of
from ops.bench.make_model import SHAPES, Size
from ops.bench.options import bench_parser
from ops.bench.record import ResultTable
from ops.bench.stepping import SteppedEngine
from shared.errors import ConfigError

BLOCK_SIZE = 16
TOKEN_BUDGET = 512
MAX_NUM_SEQS = 64
HIT_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class MissLoad:
    """Distinct prompts at once: `batch` of `prompt` tokens each, every one of which then decodes `new` tokens."""

    batch: int = 2
    prompt: int = 512
    new: int = 8


@dataclass(frozen=True, slots=True)
class MissCost:
    """Seconds that a load took in each round, with and without the cache, in pairs."""

    with_cache_s: list[float]
    without_s: list[float]

    @property
    def percent(self) -> float:
        """What the cache adds: the median over the pairs."""
        return statistics.median(self._percents)

    @property
    def percent_interval(self) -> tuple[float, float]:
        """The interval that holds the true median with 95 %: order statistics, which assume no distribution."""
        percents = sorted(self._percents)
        reach = math.ceil(0.98 * math.sqrt(len(percents)))
        middle = len(percents) // 2
        return percents[max(0, middle - reach)], percents[min(len(percents) - 1, middle + reach)]

    @property
    def _percents(self) -> list[float]:
        return [(a / b - 1) * 100 for a, b in zip(self.with_cache_s, self.without_s, strict=True)]


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Seconds to the first token, round by round, of prompts that are new and of prompts that are mostly known."""

    cold_s: list[float]
    hit_s: list[float]
    hit_share: float

    @property
    def speedup(self) -> float:
        """How many times sooner the first token of a known prompt comes: medians over each other."""
        return statistics.median(self.cold_s) / statistics.median(self.hit_s)


def _engine(
    runner: ModelRunner, vocab_size: int, num_blocks: int, max_len: int, has_prefix_cache: bool = True
) -> SteppedEngine:
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=max_len,
        enable_prefix_caching=has_prefix_cache,
    )
    return SteppedEngine(Engine(Scheduler(config), runner), range(3, vocab_size))


def measure_misses(runner: ModelRunner, vocab_size: int, load: MissLoad, rounds: int) -> MissCost:
    """Serve the same distinct prompts with and without the cache, in turn.

    The pools hold one and a half loads: each round evicts, as a cache does that has been used for a while.
    """
    sizes = (_blocks_of(load), load.prompt + load.new)
    engines = {has_cache: _engine(runner, vocab_size, *sizes, has_cache) for has_cache in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        prompts = [engines[True].random_prompt(load.prompt) for _ in range(load.batch)]
        # Who goes first alternates, so that neither always finds the caches that the other left.
        for has_cache in (True, False) if number % 2 else (False, True):
            elapsed = engines[has_cache].serve_s(prompts, load.new)
            if number:
                seconds[has_cache].append(elapsed)
    assert engines[True].engine.stats.num_prefix_hits == 0, "prompts that share nothing hit"
    return MissCost(seconds[True], seconds[False])


def cache_seconds_per_token(rounds: int) -> float:
    """Measure what hashing, looking up, publishing and evicting cost a prompt token.

    With a runner that computes nothing, the cache is the only difference between the two engines.
    """
    load = MissLoad(batch=4, prompt=8192, new=1)
    cost = measure_misses(SimulatedRunner(0, range(3, 100)), 32_000, load, rounds)
    pairs = zip(cost.with_cache_s, cost.without_s, strict=True)
    return statistics.median(a - b for a, b in pairs) / (load.batch * load.prompt)


def measure_first_tokens(runner: ModelRunner, vocab_size: int, prompt: int, rounds: int) -> FirstTokens:
    """Take turns: a prompt that is new, then one that begins with 99 % of it, in whole blocks."""
    num_shared = -(-int(prompt * HIT_SHARE) // BLOCK_SIZE) * BLOCK_SIZE
    engine = _engine(runner, vocab_size, 2 * _blocks_for(prompt), prompt + 1)
    cold_s, hit_s = [], []
    for _ in range(rounds):
        text = engine.random_prompt(prompt)
        cold_s.append(engine.serve_s([text], 1))
        hit_s.append(engine.serve_s([text[:num_shared] + engine.random_prompt(prompt - num_shared)], 1))
    return FirstTokens(cold_s, hit_s, engine.engine.stats.num_prefix_hits / (rounds * prompt))


def _blocks_for(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE + 1


def _blocks_of(load: MissLoad) -> int:
    return load.batch * _blocks_for(load.prompt + load.new) * 3 // 2


def load_runner(model: Path, prompt: int, load: MissLoad, num_threads: int | None) -> TorchModelRunner:
    """Load a model with a KV cache for both measurements.

    Raises:
        ConfigError: The model's sequences are too short.
    """
    longest = max(prompt + 1, load.prompt + load.new)
    runner = build_runner(
        RunnerConfig(
            model,
            block_size=BLOCK_SIZE,
            num_blocks=max(2 * _blocks_for(prompt), _blocks_of(load)),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_model_len=longest,
            num_threads=num_threads,
        )
    )
    if runner.max_model_len < longest:
        raise ConfigError(
            "--prompt",
            f"needs sequences of {longest} tokens, but the model's have {runner.max_model_len} at most; make one with "
            f"`python -m ops.bench.make_model --max-len {longest}`",
        )
    return runner


def _rows(misses: MissCost, per_token_s: float, first: FirstTokens, load: MissLoad) -> list[dict[str, object]]:
    without_s = statistics.median(misses.without_s)
    return [
        {
            "measurement": "misses",
            "prompt": load.prompt,
            "batch": load.batch,
            "new": load.new,
            "with_cache_s": round(statistics.median(misses.with_cache_s), 4),
            "without_cache_s": round(without_s, 4),
            "rounds": len(misses.with_cache_s),
            "cost_percent": round(misses.percent, 2),
            "cost_percent_interval": [round(bound, 2) for bound in misses.percent_interval],
            "cache_us_per_prompt_token": round(per_token_s * 1e6, 4),
            "cache_percent": round(per_token_s * load.batch * load.prompt / without_s * 100, 3),
        },
        {
            "measurement": "hits",
            "rounds": len(first.cold_s),
            "hit_share": round(first.hit_share, 4),
            "cold_ttft_ms": round(statistics.median(first.cold_s) * 1e3, 2),
            "hit_ttft_ms": round(statistics.median(first.hit_s) * 1e3, 2),
            "ttft_speedup": round(first.speedup, 1),
        },
    ]


def main(arguments: Values[str] | None = None) -> None:
    """Measure, print and record."""
    parser = bench_parser("prefix_cache", __doc__)
    add_model(parser, "directory of a model", shape=Size.M15)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompts that hit")
    parser.add_argument("--rounds", type=int, default=200, help="pairs of loads that miss")
    parser.add_argument("--hit-rounds", type=int, default=9, help="pairs of a cold prompt and one that hits")
    parser.add_argument("--num-threads", type=int, help="of CPU operations; as many as a worker takes if not given")
    options = parser.parse_args(arguments)
    load = MissLoad()
    per_token_s = cache_seconds_per_token(max(2, options.rounds // 8))
    shape = replace(SHAPES[options.shape], max_len=max(options.prompt + 1, load.prompt + load.new))
    with nullcontext(options.model) if options.model is not None else model_of(shape) as model:
        runner = load_runner(model, options.prompt, load, options.num_threads)
        vocab_size = runner.model_config.vocab_size
        misses = measure_misses(runner, vocab_size, load, options.rounds)
        first = measure_first_tokens(runner, vocab_size, options.prompt, options.hit_rounds)
        name = options.shape if options.model is None else options.model.name
        dtype = str(runner.dtype).removeprefix("torch.")
    common = {"model": name, "dtype": dtype, "threads": torch.get_num_threads()}
    rows = _rows(misses, per_token_s, first, load)
    rows[1]["prompt"] = options.prompt
    for row in rows:
        ResultTable("prefix_cache").add(row, **common)


if __name__ == "__main__":
    main()
