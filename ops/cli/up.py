"""`headrace up`."""

from __future__ import annotations

import os

from ops.cli.options import settings_command
from ops.cli.parts import require
from ops.stack.config import UpConfig


def run(config: UpConfig) -> int:
    """Run the whole system on this machine.

    In the foreground, on loopback: starts NATS, Redis, a gateway and a worker with the demo model, waits until a first
    generation has succeeded, and prints how to use it. Ctrl-C stops everything in order; a second Ctrl-C kills. A part
    that crashes, or stands still, is started again.

    Settings of the parts (see `headrace gateway --help` and `headrace worker --help`) are taken from the environment.
    """
    require("embedded", "starlette", "httptools", "redis", "prometheus_client")
    from ops.stack.run import run as run_stack

    return run_stack(config, os.environ)


command = settings_command(UpConfig, "up", run)
