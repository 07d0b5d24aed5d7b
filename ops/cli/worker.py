"""`headrace worker`."""

from __future__ import annotations

from gpu_worker.start.config import WorkerConfig
from ops.cli.options import VariableOption, as_given, settings_command
from ops.cli.parts import require


def run(config: WorkerConfig, check: bool) -> int:
    """Run the engine of one model.

    It pulls from the queue what its cache can hold. Run one per GPU, or one per group of CPU cores.
    """
    real = ("torch", "numpy", "safetensors") if config.simulate is None else ()
    require("worker", "tokenizers", "jinja2", *real)
    if check:
        from ops.doctor.preflight import preflight

        return preflight(config, as_given)
    from gpu_worker.start.worker import main

    return main(config)


_CHECK = VariableOption(
    ["--check"],
    is_flag=True,
    envvar="HEADRACE_CHECK",
    help="Do not join: say whether device, memory, model, NATS (rights, clock, other revisions) would let this worker "
    "serve, and exit with 1 if not.",
)

command = settings_command(WorkerConfig, "worker", run, [_CHECK])
