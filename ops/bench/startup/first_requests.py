"""What a runner that has just started does with its first requests: their time, and which kernels it compiles."""

from __future__ import annotations

import time
from queue import Queue

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.engine_thread import EngineThread, StepOutcome
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling

PROMPT, NEW = 100, 8
# Prompts of a load that mixes chunks with decodes of many.
_MIXED = tuple(1 + 37 * number % 900 for number in range(40))
_TIMEOUT_S = 120.0


def compiled_kernels() -> list[str]:
    """Return a list that the name of every kernel is added to that Triton compiles from now on."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        return names

    def compiled(*, repr: str, **_: object) -> None:
        names.append(repr)

    knobs.runtime.jit_post_compile_hook = compiled
    return names


def first_requests(runner: TorchModelRunner) -> dict[str, object]:
    """Serve one request, the same again, and a mixed load, by an engine in its thread."""
    limits = runner.step_limits
    config = SchedulerConfig(
        block_size=limits.block_size,
        num_blocks=runner.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        enable_prefix_caching=False,
        windows=runner.windows,
        state=state_config(runner.num_state_slots, limits.block_size) if runner.model.config.has_states else None,
    )
    compiled = compiled_kernels()
    outcomes: Queue[StepOutcome] = Queue()
    engine = EngineThread(Engine(Scheduler(config), runner))
    engine.start(outcomes.put)
    longest = limits.max_model_len - NEW
    try:
        first_s, second_s = (serve_s(engine, outcomes, [min(PROMPT, longest)]) for _ in range(2))
        mixed_s = serve_s(engine, outcomes, [min(length, longest) for length in _MIXED])
    finally:
        engine.stop()
    return {
        "first_ms": round(1e3 * first_s, 1),
        "second_ms": round(1e3 * second_s, 1),
        "mixed_s": round(mixed_s, 2),
        "compiled": len(compiled),
        "compiled_kernels": sorted(set(compiled)),
    }


def serve_s(engine: EngineThread, outcomes: Queue[StepOutcome], lengths: list[int]) -> float:
    """Return the seconds from adding prompts of these lengths to the last token of all.

    Raises:
        RuntimeError: A step failed, or none came.
    """
    started = time.perf_counter()
    for number, length in enumerate(lengths):
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        engine.add(Sequence(f"{started}-{number}", [5] * length, length, sampling, max_tokens=NEW))
    num_left = len(lengths)
    while num_left:
        outcome = outcomes.get(timeout=_TIMEOUT_S)
        if outcome.error is not None:
            raise RuntimeError(f"the engine failed: {outcome.error}") from outcome.error
        num_left -= sum(event.finish is not None for event in outcome.events)
    return time.perf_counter() - started
