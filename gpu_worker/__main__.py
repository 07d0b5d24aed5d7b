"""`python -m gpu_worker`: run a worker with settings from the environment alone."""

from __future__ import annotations

import os
import sys

from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.worker import main
from shared.config import resolve
from shared.errors import HeadraceError


def run() -> int:
    """Resolve the settings and run the worker; report a missing setting, model or server in one line."""
    try:
        return main(resolve(WorkerConfig, {}, os.environ))
    except HeadraceError as error:
        print(f"headrace worker: {error}", file=sys.stderr)  # noqa: T201 - this is the command line
        return 2


if __name__ == "__main__":
    sys.exit(run())
