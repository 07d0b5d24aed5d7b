"""An engine that a bench steps by itself: real scheduler, real runner, no queue, no tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine


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
) -> Engine:
    """Make an engine over a runner."""
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=max_model_len,
        enable_prefix_caching=has_prefix_cache,
    )
    return Engine(Scheduler(config, speculation), runner)


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
