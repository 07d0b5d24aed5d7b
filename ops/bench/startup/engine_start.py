"""Starts the engine once, in a process of its own; prints its times and memory, and when it was ready.

Run by `ops.bench.startup`. Arguments: model directory, device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from gpu_worker.execution.start_up import StartUp
from ops.bench.load.processes import peak_rss_bytes

MAX_NUM_SEQS = 256


def main(directory: str, device: str) -> None:
    """Build a runner as a worker would with its default settings."""
    start_up = StartUp()
    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.start.engine_setup import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS

    config = RunnerConfig(
        Path(directory),
        device=device,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS,
    )
    imported_s = start_up.total_s
    build_runner(config, start_up)
    seconds = {f"{stage.value}_s": round(duration, 3) for stage, duration in start_up.seconds.items()}
    memory = {"peak_rss_gb": round(peak_rss_bytes([os.getpid()]) / 1e9, 2)}
    print(json.dumps({"import_s": round(imported_s, 3), **seconds, **memory, "ready_s": time.time()}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
