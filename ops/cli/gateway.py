"""`headrace gateway`."""

from __future__ import annotations

from gateway.config import GatewayConfig
from ops.cli.options import settings_command
from ops.cli.parts import require


def run(config: GatewayConfig) -> int:
    """Run the HTTP edge of the queue.

    It offers an OpenAI-compatible API and keeps nothing but the streams it is serving, so run as many as you like.
    """
    require("gateway", "starlette", "httptools", "redis", "prometheus_client")
    from gateway.process.gateway import main

    return main(config)


command = settings_command(GatewayConfig, "gateway", run)
