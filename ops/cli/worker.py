"""`headrace worker`."""

from __future__ import annotations

from gpu_worker.start.config import WorkerConfig
from ops.cli.options import settings_command
from ops.cli.parts import require


def run(config: WorkerConfig) -> int:
    """Run the engine of one model.

    It pulls from the queue what its cache can hold. Run one per GPU, or one per group of CPU cores.
    """
    real = ("torch", "numpy", "safetensors") if config.simulate is None else ()
    require("worker", "tokenizers", "jinja2", *real)
    from gpu_worker.start.worker import main

    return main(config)


command = settings_command(WorkerConfig, "worker", run)
