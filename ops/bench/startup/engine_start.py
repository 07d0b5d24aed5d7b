"""Starts the engine once, in a process of its own; prints its times, memory, time of readiness, and first requests.

Run by `ops.bench.startup`. Arguments: model directory, device, number of ranks, captured steps. A runner that has just
started serves its first requests; the record has their times, and which kernels were compiled for them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

from gpu_worker.execution.start_up import StartUp
from ops.bench.systems import peak_rss_bytes

if TYPE_CHECKING:
    from gpu_worker.core.model_runner import ModelRunner
    from gpu_worker.core.sequence import Sequence
    from gpu_worker.engine.engine_thread import EngineThread, StepOutcome
    from gpu_worker.execution.runner import TorchModelRunner

MAX_NUM_SEQS = 256
PROMPT, NEW = 100, 8
# Prompts of a load that mixes chunks with decodes of many.
_MIXED = tuple(1 + 37 * number % 900 for number in range(40))
_TIMEOUT_S = 120.0


def main(directory: str, device: str, num_ranks: str, cuda_graphs: str = "all") -> None:
    """Build a runner as a worker would with its default settings, or a group of ranks."""
    # Imports from here on count as part of the start.
    start_up = StartUp()
    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.ranks.group import RankGroup
    from gpu_worker.execution.ranks.runner import build_group_runner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.start.ended_thread import run_in_ended_thread
    from gpu_worker.start.engine_setup import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS

    config = RunnerConfig(
        Path(directory),
        device=device,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS,
        tensor_parallel_size=int(num_ranks),
        cuda_graphs=cuda_graphs,
    )
    imported_s, said = start_up.total_s, memory_said()
    group = None if config.num_ranks == 1 else RankGroup(config, "warning")
    with nullcontext() if group is None else closing(group):
        divided = None if group is None else build_group_runner(config, group, start_up)
        if divided is not None:
            runner = divided.own
        elif device == "cpu":
            runner = build_runner(config, start_up)
        else:
            runner = run_in_ended_thread(lambda: build_runner(config, start_up))
        ready_s = time.time()
        served = first_requests(runner, divided)
        seconds = {f"{stage.value}_s": round(duration, 3) for stage, duration in start_up.seconds.items()}
        pids = [os.getpid()] if group is None else list(group.pids.values())
        rss_gb = round(peak_rss_bytes(pids) / 1e9, 2)
        memory = {"peak_rss_gb": rss_gb, "memory": said, **device_memory(runner)}
    print(json.dumps({"import_s": round(imported_s, 3), **seconds, **memory, **served, "ready_s": ready_s}))


def memory_said() -> list[str]:
    """Return a list that the lines of a GPU's memory are added to, as the worker logs them."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("memory: "):
                lines.append(record.getMessage())

    logger = logging.getLogger("gpu_worker.execution.build")
    logger.setLevel(logging.INFO)
    logger.addHandler(Kept())
    return lines


def device_memory(runner: TorchModelRunner) -> dict[str, float]:
    """Return the GPU memory in use according to the driver, and the part that this process knows of, in GB."""
    import torch

    device = runner.model.device
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    cache = sum(tensor.nbytes for layer in runner.cache.layers for tensor in (layer.keys, layer.values))
    found = {"driver": total - free, "reserved": torch.cuda.memory_reserved(device), "kv_cache": cache, "device": total}
    return {f"{name}_gb": round(num_bytes / 1e9, 2) for name, num_bytes in found.items()}


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


def first_requests(runner: TorchModelRunner, divided: ModelRunner | None) -> dict[str, object]:
    """Serve one request, the same again, and a mixed load, by an engine in its thread; `divided` runs all ranks."""
    from gpu_worker.engine.engine_thread import EngineThread
    from ops.bench.stepping import engine_of, states_of

    limits = runner.step_limits
    made = engine_of(
        runner,
        max_num_seqs=limits.max_num_seqs,
        token_budget=limits.max_num_batched_tokens,
        enable_prefix_caching=False,
        state=states_of(runner),
        divided=divided,
    )
    compiled = compiled_kernels()
    outcomes: Queue[StepOutcome] = Queue()
    engine = EngineThread(made.engine)
    engine.start(outcomes.put)

    def serve(*lengths: int) -> float:
        lengths_within = (min(length, limits.max_model_len - NEW) for length in lengths)
        return serve_s(engine, outcomes, [made.sequence([5] * length, NEW) for length in lengths_within])

    try:
        first_s, second_s, mixed_s = serve(PROMPT), serve(PROMPT), serve(*_MIXED)
    finally:
        engine.stop()
    return {
        "first_ms": round(1e3 * first_s, 1),
        "second_ms": round(1e3 * second_s, 1),
        "mixed_s": round(mixed_s, 2),
        "compiled": len(compiled),
        "compiled_kernels": sorted(set(compiled)),
    }


def serve_s(engine: EngineThread, outcomes: Queue[StepOutcome], sequences: list[Sequence]) -> float:
    """Return the seconds from adding sequences to the last token of all.

    Raises:
        RuntimeError: A step failed, or none came.
    """
    started = time.perf_counter()
    for sequence in sequences:
        engine.add(sequence)
    num_left = len(sequences)
    while num_left:
        outcome = outcomes.get(timeout=_TIMEOUT_S)
        if outcome.error is not None:
            raise RuntimeError(f"the engine failed: {outcome.error}") from outcome.error
        num_left -= sum(event.finish is not None for event in outcome.events)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:5])
