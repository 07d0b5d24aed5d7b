"""Starts the engine once, in a process of its own; prints its times and memory, when it was ready, and what it served.

Run by `ops.bench.startup`. Arguments: model directory, device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.execution.start_up import StartUp
from ops.bench.systems import peak_rss_bytes

if TYPE_CHECKING:
    from gpu_worker.execution.runner import TorchModelRunner

MAX_NUM_SEQS = 256


def main(directory: str, device: str) -> None:
    """Build a runner as a worker would with its default settings."""
    start_up = StartUp()
    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.start.ended_thread import run_in_ended_thread
    from gpu_worker.start.engine_setup import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS
    from ops.bench.startup.first_requests import first_requests

    config = RunnerConfig(
        Path(directory),
        device=device,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS,
    )
    imported_s = start_up.total_s
    if device == "cpu":
        runner = build_runner(config, start_up)
    else:
        runner = run_in_ended_thread(lambda: build_runner(config, start_up))
    ready_s = time.time()
    served = first_requests(runner)
    seconds = {f"{stage.value}_s": round(duration, 3) for stage, duration in start_up.seconds.items()}
    memory = {"peak_rss_gb": round(peak_rss_bytes([os.getpid()]) / 1e9, 2)} | device_memory(runner)
    print(json.dumps({"import_s": round(imported_s, 3), **seconds, **memory, **served, "ready_s": ready_s}))


def device_memory(runner: TorchModelRunner) -> dict[str, float]:
    """Return what the driver says is used on the runner's GPU, and what of that this process knows of, in GB."""
    import torch

    device = runner.model.device
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    cache = sum(tensor.nbytes for layer in runner.cache.layers for tensor in (layer.keys, layer.values))
    found = {"driver": total - free, "reserved": torch.cuda.memory_reserved(device), "kv_cache": cache, "device": total}
    return {f"{name}_gb": round(num_bytes / 1e9, 2) for name, num_bytes in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:3])
