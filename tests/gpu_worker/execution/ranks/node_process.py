"""A host of a group, as a process: `python -m ... MODEL ADDRESS PORT NODE SIZE NNODES`; the token is in HR_TOKEN."""

import os
import sys
from pathlib import Path

from gpu_worker.execution.ranks.node import Node
from gpu_worker.execution.runner_config import RunnerConfig
from shared.errors import HeadraceError
from tests.gpu_worker.execution.ranks.group_run import DEFAULTS

if __name__ == "__main__":
    model, address, port, node, size, nnodes = sys.argv[1:]
    config = RunnerConfig(Path(model), **DEFAULTS, tensor_parallel_size=int(size), nnodes=int(nnodes))
    try:
        Node(config, "warning", "text").serve(address, int(port), os.environ["HR_TOKEN"], int(node))
    except HeadraceError as error:
        sys.exit(str(error))
