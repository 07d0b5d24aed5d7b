"""A receiver of OTLP over HTTP, as small as one can be: it keeps the spans that it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import wait_for


@dataclass(frozen=True)
class ReceivedSpan:
    """One span. Times are Unix nanoseconds, ids hexadecimal; `service` is the name of the process's service."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class Receiver:
    """What has come so far."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def wait_for(self, count: int, trace_id: str, timeout_s: float = 30.0) -> dict[str, list[ReceivedSpan]]:
        """Return the spans of a trace by name, once there are as many."""

        def found() -> list[ReceivedSpan]:
            return [span for span in list(self.spans) if span.trace_id == trace_id]

        wait_for(lambda: len(found()) >= count, timeout_s, found)
        return {name: [span for span in found() if span.name == name] for name in {span.name for span in found()}}


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Receive on a free port of loopback until the block ends."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            receiver.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        service = {item.key: item.value for item in resource_spans.resource.attributes}["service.name"].string_value
        for scope in resource_spans.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.name,
                    service,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                    {item.key: _value(item.value) for item in span.attributes},
                )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
