"""Spans for OpenTelemetry, sent by OTLP over HTTP; what names follow from is W3C's `traceparent`.

Off unless an endpoint is set: `make_tracing` returns None then, and nothing of OpenTelemetry is imported. What a
process knows about a request it tells when the request ends, with the times that it noted; only the gateway's own span
is begun at the start, because others have to name it. Times of other machines' spans are by their own clocks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError
from shared.urls import is_http_url

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

ENDPOINT_HELP = "Where traces go by OTLP over HTTP, as http://host:4318; none if not given. Needs `headrace[tracing]`."
RATIO_HELP = "Share of requests that are traced, of those whose client has not decided it."
SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
# An unreachable collector delays no request; spans that it does not take are dropped.
_EXPORT_TIMEOUT_S = 5
_MAX_QUEUED_SPANS = 4096

AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue | None]


class Tracing:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider, tracer: Tracer) -> None:
        self._provider = provider
        self._tracer = tracer

    def begin(self, name: str, parent: str | None) -> Span:
        """Begin the span of a request that a client has sent, below the client's own span if it has told of one."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, context=_context(parent), kind=SpanKind.SERVER)

    def end(self, span: Span, name: str, attributes: Attributes, error: str | None) -> None:
        """End such a span under its final name."""
        span.update_name(name)
        _finish(span, attributes, error)
        span.end()

    def add(
        self, name: str, parent: str, began: float, ended: float, attributes: Attributes, error: str | None = None
    ) -> None:
        """Add a span that is over, part of the one whose `traceparent` is `parent`; times are of `time.monotonic()`."""
        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(name, context=_context(parent), start_time=int((began + offset) * 1e9))
        _finish(span, attributes, error)
        span.end(int((ended + offset) * 1e9))

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        self._provider.force_flush(_EXPORT_TIMEOUT_S * 1000)
        self._provider.shutdown()


def traceparent(span: Span) -> str:
    """Return the name of a span as W3C writes it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def check_endpoint(endpoint: str | None) -> None:
    """Raise `ConfigError` for an endpoint to which nothing could be sent; None is none."""
    if endpoint and not is_http_url(endpoint):
        problem = f"is {endpoint!r}; allowed: a URL that begins with http:// or https:// and names a host"
        raise ConfigError("HEADRACE_OTLP_ENDPOINT", problem)


def make_tracing(endpoint: str | None, ratio: float, role: str, instance: str) -> Tracing | None:
    """Return what makes the spans of this process; None without an endpoint.

    Args:
        endpoint: URL of a collector; `/v1/traces` is added unless it is there.
        ratio: Share of traces to keep that begin here.
        role: `gateway` or `worker`.
        instance: Name of the process.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the endpoint is no URL.
    """
    check_endpoint(endpoint)
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        problem = f"needs packages that are missing ({error.name}); pip install 'headrace[tracing]'"
        raise ConfigError("HEADRACE_OTLP_ENDPOINT", problem) from None
    url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
    resource = Resource.create(
        {"service.namespace": "headrace", "service.name": f"headrace-{role}", "service.instance.id": instance}
    )
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS))
    return Tracing(provider, provider.get_tracer("headrace", schema_url=SCHEMA_URL))


def _context(parent: str | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({} if parent is None else {"traceparent": parent}, Context())


def _finish(span: Span, attributes: Attributes, error: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    if not span.is_recording():
        return
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
