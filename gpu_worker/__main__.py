"""`python -m gpu_worker`: a worker configured by the environment alone."""

from __future__ import annotations

import os
import sys

from gpu_worker.config import WorkerConfig
from gpu_worker.worker import main
from shared.config import resolve
from shared.errors import ConfigError

if __name__ == "__main__":
    try:
        settings = resolve(WorkerConfig, {}, os.environ)
    except ConfigError as error:
        sys.exit(f"headrace worker: {error}")
    sys.exit(main(settings))
