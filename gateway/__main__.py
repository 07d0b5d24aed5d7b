"""`python -m gateway`: run a gateway with settings from the environment alone."""

from __future__ import annotations

import os
import sys

from gateway.config import GatewayConfig
from gateway.process.gateway import main
from shared.config import resolve
from shared.errors import HeadraceError


def run() -> int:
    """Resolve the settings and serve; print a missing setting or server as one line."""
    try:
        return main(resolve(GatewayConfig, {}, os.environ))
    except HeadraceError as error:
        print(f"headrace gateway: {error}", file=sys.stderr)  # noqa: T201 - this is the command line
        return 2


if __name__ == "__main__":
    sys.exit(run())
