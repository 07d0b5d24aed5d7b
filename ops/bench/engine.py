"""Measures the engine alone, without queue, gateway or tokenizer: real scheduler, real runner, random prompts.

A measurement fills a batch from empty, which gives the prefill rate, then decodes with all sequences running. Prompts
share no beginning, so the prefix cache is on and never hits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Values
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpu_worker.execution.build import build_runner
from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.runner import build_group_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp
from gpu_worker.models.config import ModelConfig
from ops.bench.stepping import engine_of
from shared.errors import ConfigError

Figures = TypeVar("Figures", bound=Any)
LARGE_READ_BYTES = 512 << 20
"""Of a read that no cache holds."""
_LEAST_READ_BYTES = 1 << 20
_ROW_VALUES = 4096
_READ_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Load:
    """Load on an engine: `batch` sequences of `prompt` tokens, and `new` decode steps of all of them."""

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of an engine under a load.

    Attributes:
        prefill_rate: Prompt tokens per second while any prompt was unfinished.
        decode_rate: Tokens per second while every sequence was decoding.
        step_s: Median time of those decode steps; None for a peer that does not tell.
        bandwidth_fraction: What such a step reads at least, over what a plain read of as many bytes reads in that time;
            ours alone. None too where the step is faster than the plain read, which is then no measure of it.
    """

    prefill_rate: float
    decode_rate: float
    step_s: float | None = None
    bandwidth_fraction: float | None = None

    def others(self) -> dict[str, float]:
        """Return the figures of a comparison to record beside the decode rate."""
        share = {} if self.bandwidth_fraction is None else {"bandwidth_fraction": round(self.bandwidth_fraction, 3)}
        return {"prefill_tokens_per_s": round(self.prefill_rate, 1), **share}


class EngineBench:
    """Owns an engine that serves one load after another."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        num_threads: int | None,
        max_load: Load,
        token_budget: int,
        block_size: int,
        kv_dtype: str = "auto",
        num_ranks: int = 1,
    ) -> None:
        """Load the model, with a KV cache for `max_load`, in as many ranks of `num_threads` threads each.

        Raises:
            ConfigError: The model's sequences are shorter.
        """
        self._token_budget = token_budget
        self._max_len = max_load.prompt + self._room(max_load)
        blocks_per_sequence = -(-self._max_len // block_size) + 1
        config = RunnerConfig(
            model,
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            block_size=block_size,
            num_blocks=blocks_per_sequence * max_load.batch,
            max_num_seqs=max_load.batch,
            max_num_batched_tokens=token_budget,
            max_model_len=self._max_len,
            num_threads=num_threads,
            tensor_parallel_size=num_ranks,
        )
        self._group = None if num_ranks == 1 else RankGroup(config, "warning")
        divided = None if self._group is None else build_group_runner(config, self._group, StartUp())
        self._runner: TorchModelRunner = build_runner(config) if divided is None else divided.own
        if self._runner.max_model_len < self._max_len:
            raise ConfigError(
                "HEADRACE_PROMPT",
                f"with HEADRACE_NEW and the batch makes {self._max_len} tokens, but the model's sequences have "
                f"{self._runner.max_model_len} at most",
            )
        # The same for all loads, because its plans tell the runner which sequences have left.
        batch = max_load.batch
        self._engine = engine_of(self._runner, max_num_seqs=batch, token_budget=token_budget, divided=divided)

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self._group is not None:
            self._group.close()

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration."""
        return self._runner.model_config

    @property
    def dtype(self) -> torch.dtype:
        """What the model runs in."""
        return self._runner.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """What dense weights are in memory."""
        return self._runner.model.embedding.dtype

    def _room(self, load: Load) -> int:
        """Return how many tokens a sequence may decode, so that none ends before the measurement does.

        Those prefilled first decode while others are prefilled, which takes the steps that a budget without what
        decodes needs, and one more a prompt where chunks are rounded.
        """
        least_chunk = max(1, self._token_budget - load.batch)
        return -(-load.batch * load.prompt // least_chunk) + load.batch + load.new + 1

    def measure(self, load: Load, *, temperature: float = 0.0) -> Measurement:
        """Serve a load once, beginning with an empty engine."""
        engine = self._engine
        room = self._room(load)
        sequences = [
            engine.add(engine.random_prompt(load.prompt), room, temperature=temperature) for _ in range(load.batch)
        ]
        prefill_s, steps = engine.prefill(sequences), engine.step_seconds(load.new)
        engine.abort(sequences)
        return Measurement(
            load.batch * load.prompt / prefill_s, load.batch * load.new / sum(steps), statistics.median(steps)
        )


def medians(results: Values[Figures]) -> Figures:
    """Return the median of each figure of dataclasses of one kind; None where none of them tells it."""
    columns = {
        field.name: [value for result in results if (value := getattr(result, field.name)) is not None]
        for field in fields(results[0])
    }
    median: Figures = type(results[0])(
        **{name: statistics.median(known) if known else None for name, known in columns.items()}
    )
    return median


def read_bandwidth(num_bytes: int = LARGE_READ_BYTES) -> float:
    """Measure bytes per second of reading `num_bytes` again and again, with torch's number of threads.

    A step's reads may fit into a cache, so a step is compared with a plain read of as many bytes. The best of some
    rounds of two plain reads, a sum and a product with a vector, counts.
    """
    num_rows = -(-min(max(num_bytes, _LEAST_READ_BYTES), LARGE_READ_BYTES) // (4 * _ROW_VALUES))
    values = torch.ones(num_rows, _ROW_VALUES, dtype=torch.float32)
    vector = torch.ones(_ROW_VALUES, dtype=torch.float32)
    repeats = max(1, _LEAST_READ_BYTES * 16 // values.nbytes)
    best = float("inf")
    for read in (values.sum, partial(torch.mv, values, vector)):
        for _ in range(_READ_ROUNDS):
            started = time.perf_counter()
            for _ in range(repeats):
                read()
            best = min(best, (time.perf_counter() - started) / repeats)
    return values.nbytes / best


def bandwidth_share(step_bytes: int, step_s: float, read_rate: float) -> float | None:
    """Return a step's rate of reading over `read_rate`, that of a plain read; None where the step is faster."""
    share = step_bytes / step_s / read_rate
    return share if share <= 1 else None


def share_text(share: float | None, step_bytes: int) -> str:
    """Return a share as text, or why a step has none.

    A step too large for every cache cannot have run from one: then the peak is too low or the bytes are too many.
    """
    if share is not None:
        return f"{share:.0%}"
    return "in cache" if step_bytes < LARGE_READ_BYTES else "above peak"
