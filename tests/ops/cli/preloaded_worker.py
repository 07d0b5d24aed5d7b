"""`headrace` with what `headrace worker` imports, PyTorch above all."""

from __future__ import annotations

import importlib

from ops.cli import main as run

for name in ("gpu_worker.start.assembly", "gpu_worker.start.engine_setup", "ops.cli.worker", "ops.doctor.preflight"):
    importlib.import_module(name)

__all__ = ["run"]
