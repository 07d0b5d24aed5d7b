"""Makes what tells of a worker's requests, by the settings: lines in the log, and spans for OpenTelemetry."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from gpu_worker.consumer.request_observer import RequestObserver
from gpu_worker.start.config import WorkerConfig
from shared.request_log import RequestLog
from shared.tracing import make_tracing

_log = logging.getLogger("gpu_worker.requests")


@contextlib.contextmanager
def observing(config: WorkerConfig, worker: str) -> Iterator[RequestObserver]:
    """Tell of requests until the block ends, and send what is left then.

    Raises:
        ConfigError: Traces are wanted and cannot be made.
    """
    # Whether a request is traced was decided where its trace began.
    tracing = make_tracing(config.otlp_endpoint, 1.0, "worker", worker)
    log = RequestLog(_log, config.request_log_per_s)
    try:
        yield RequestObserver(log, worker, tracing)
    finally:
        log.close()
        if tracing is not None:
            tracing.close()
