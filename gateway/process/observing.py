"""Makes what tells of requests, by the settings: lines in the log, and spans for OpenTelemetry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from gateway.api.request_observer import RequestObserver
from gateway.config import GatewayConfig
from shared.request_log import RequestLog
from shared.tracing import make_tracing

_logger = logging.getLogger("gateway.requests")


@contextlib.asynccontextmanager
async def observing(config: GatewayConfig, slot: int) -> AsyncIterator[RequestObserver]:
    """Tell of requests until the block ends, and send what is left then.

    Raises:
        ConfigError: Traces are wanted and cannot be made.
    """
    instance = f"{socket.gethostname()}-{os.getpid()}-{slot}"
    tracing = make_tracing(config.otlp_endpoint, config.trace_ratio, "gateway", instance)
    log = RequestLog(_logger, config.request_log_per_s)
    try:
        yield RequestObserver(log, tracing, logs_prompts=config.log_prompts)
    finally:
        log.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
