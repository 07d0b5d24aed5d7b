"""An engine that a bench steps by itself: real scheduler, real runner, no queue, no tokenizer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gpu_worker.core.media import SharedImages
from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import SequenceEvent
from gpu_worker.core.tiers import KvTiers
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from shared.sampling import Sampling

BLOCK_SIZE = 16
_NUM_SPECIAL = 3


class SteppedEngine:
    """Owns an engine, and makes the random prompts that it is given: they share no beginning.

    The first tokens of a vocabulary are special ones, and in no prompt.
    """

    def __init__(self, engine: Engine, runner: TorchModelRunner) -> None:
        self.engine = engine
        self.runner = runner
        self._random = random.Random(0)
        self._num_made = 0

    def random_prompt(self, length: int) -> list[int]:
        """Return tokens that no earlier prompt began with."""
        return self._random.choices(range(_NUM_SPECIAL, self.runner.model_config.vocab_size), k=length)

    def sequence(self, prompt: list[int], max_tokens: int, **sampling: Any) -> Sequence:
        """Return a sequence that decodes the given number of tokens."""
        self._num_made += 1
        sampling = {"temperature": 0.0, "seed": self._num_made, "ignore_eos": True, **sampling}
        name = f"sequence-{self._num_made}"
        return Sequence(name, list(prompt), len(prompt), Sampling(**sampling), max_tokens=max_tokens)

    def add(self, prompt: list[int], max_tokens: int, **sampling: Any) -> Sequence:
        """Queue such a sequence."""
        sequence = self.sequence(prompt, max_tokens, **sampling)
        self.engine.add(sequence)
        return sequence

    def step(self) -> list[SequenceEvent]:
        """Take a step, after the pause that the engine's thread would make: threads that load KV need the interpreter.

        Raises:
            RuntimeError: It failed.
        """
        if pause_s := self.engine.pause_s:
            time.sleep(pause_s)
        events = self.engine.step()
        if self.engine.last_error is not None:
            raise RuntimeError(f"the engine failed: {self.engine.last_error}") from self.engine.last_error
        return events

    def step_while(self, condition: Callable[[], bool]) -> float:
        """Step as long as a condition holds; return the seconds.

        Raises:
            RuntimeError: A step failed.
        """
        started = time.perf_counter()
        while condition():
            self.step()
        return time.perf_counter() - started

    def events(self) -> Iterator[SequenceEvent]:
        """Step until every sequence has ended; yield what happens to each."""
        while self.engine.has_work():
            yield from self.step()

    def run(self) -> float:
        """Step until every sequence has ended; return the seconds."""
        return self.step_while(self.engine.has_work)

    def prefill(self, sequences: list[Sequence]) -> float:
        """Step until all of some sequences decode; return the seconds."""
        return self.step_while(lambda: any(sequence.num_output_tokens == 0 for sequence in sequences))

    def step_seconds(self, count: int) -> list[float]:
        """Return the seconds of each of the next steps."""
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        return seconds

    def abort(self, sequences: list[Sequence]) -> None:
        """End sequences that have not ended by themselves, and what else there is."""
        for sequence in sequences:
            assert self.engine.abort(sequence.id) is not None, "a sequence has ended before its time"
        self.run()

    def serve_s(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Return the seconds from adding prompts to an idle engine to the last of their tokens."""
        started = time.perf_counter()
        for prompt in prompts:
            self.add(prompt, max_tokens)
        self.run()
        return time.perf_counter() - started


def engine_of(
    runner: TorchModelRunner,
    *,
    max_num_seqs: int,
    token_budget: int = 512,
    speculation: Speculation | None = None,
    divided: ModelRunner | None = None,
    images: SharedImages | None = None,
    tiers: KvTiers | None = None,
    **settings: Any,
) -> SteppedEngine:
    """Make an engine that has all blocks of a model's runner, and takes sequences as long as it does.

    Where the runner is one of several ranks, `divided` runs them all. `settings` are further ones of the scheduler.
    """
    config = SchedulerConfig(
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=runner.max_model_len,
        windows=runner.windows,
        **settings,
    )
    scheduler = Scheduler(config, speculation, images=images, tiers=tiers)
    return SteppedEngine(Engine(scheduler, divided or runner), runner)


def make_engine(config: RunnerConfig, *, images: SharedImages | None = None, **settings: Any) -> SteppedEngine:
    """Load a model; where no number of blocks is given, all sequences have room for `max_model_len` tokens."""
    if config.num_blocks is None:
        assert config.max_model_len is not None
        config = replace(config, num_blocks=config.max_num_seqs * (-(-config.max_model_len // config.block_size) + 1))
    runner, budget = build_runner(config, images=images), config.max_num_batched_tokens
    settings = {"enable_prefix_caching": False, **settings}
    return engine_of(runner, max_num_seqs=config.max_num_seqs, token_budget=budget, images=images, **settings)


def states_of(runner: TorchModelRunner) -> StateConfig | None:
    """Return how the scheduler places the states of recurrent layers; None in models without."""
    return state_config(runner.num_state_slots, runner.block_size) if runner.model.config.has_states else None
