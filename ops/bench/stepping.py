"""An engine that a bench steps by itself: real scheduler, real runner, no queue, no tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable

from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling


def make_engine(
    runner: ModelRunner,
    *,
    num_blocks: int,
    max_num_seqs: int,
    token_budget: int,
    max_model_len: int,
    block_size: int = 16,
    has_prefix_cache: bool = True,
    speculation: Speculation | None = None,
    windows: tuple[WindowConfig, ...] = (),
    state: StateConfig | None = None,
) -> Engine:
    """Make an engine over a runner."""
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=max_model_len,
        enable_prefix_caching=has_prefix_cache,
        windows=windows,
        state=state,
    )
    return Engine(Scheduler(config, speculation), runner)


def engine_of(
    runner: TorchModelRunner,
    *,
    max_num_seqs: int,
    token_budget: int = 512,
    has_prefix_cache: bool = True,
    speculation: Speculation | None = None,
) -> Engine:
    """Make an engine that has all blocks of a model's runner, and takes sequences as long as it does."""
    return make_engine(
        runner,
        num_blocks=runner.num_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=runner.max_model_len,
        block_size=runner.block_size,
        has_prefix_cache=has_prefix_cache,
        speculation=speculation,
        windows=runner.windows,
    )


class Prompts:
    """Makes sequences with random prompts that share no beginning."""

    def __init__(self, vocabulary: range) -> None:
        """Draw from a vocabulary."""
        self._random = random.Random(0)
        self._vocabulary = vocabulary
        self._num_made = 0

    def tokens(self, count: int) -> list[int]:
        """Draw tokens."""
        return self._random.choices(self._vocabulary, k=count)

    def sequence(self, prompt: list[int], new: int, temperature: float = 0.0) -> Sequence:
        """Make a sequence that decodes `new` tokens."""
        self._num_made += 1
        sampling = Sampling(temperature=temperature, seed=self._num_made, ignore_eos=True)
        return Sequence(f"sequence-{self._num_made}", list(prompt), len(prompt), sampling, max_tokens=new)


def step(engine: Engine) -> list[SequenceEvent]:
    """Take a step.

    Raises:
        RuntimeError: It failed.
    """
    events = engine.step()
    if engine.last_error is not None:
        raise RuntimeError(f"the engine failed: {engine.last_error}") from engine.last_error
    return events


def step_while(engine: Engine, condition: Callable[[], bool]) -> None:
    """Step as long as a condition holds.

    Raises:
        RuntimeError: A step failed.
    """
    while condition():
        step(engine)
