"""A proxy that makes the first request of an agent call a tool: a model that has learned nothing calls none by itself.

All else passes unchanged, so what the agent meets is the server.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 120
_OWN_HEADERS = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")


class ForcingProxy(ThreadingHTTPServer):
    """Listens on loopback, and forces a tool once.

    Attributes:
        statuses: Of the answers to POST, in order.
        bodies: The requests' bodies, as they were sent on.
    """

    daemon_threads = True

    def __init__(self, target: str, tool: str | None, choice: dict[str, Any]) -> None:
        """Send on to `target`; set `tool_choice` to `choice` in the first request that offers `tool`."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.tool, self.choice = urlsplit(target), tool, choice
        self.statuses: list[int] = []
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def forced(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body that is sent on."""
        if self.tool is not None and self.tool in {tool.get("name") for tool in body.get("tools") or []}:
            self.tool = None
            return body | {"tool_choice": self.choice}
        return body


@contextmanager
def forcing_proxy(target: str, tool: str | None, choice: dict[str, Any]) -> Iterator[ForcingProxy]:
    """Run a proxy until the block ends."""
    proxy = ForcingProxy(target, tool, choice)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ForcingProxy

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_HEAD(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        body = self.server.forced(json.loads(data))
        self.server.bodies.append(body)
        self.server.statuses.append(self._pass_on(json.dumps(body).encode()))

    def _pass_on(self, body: bytes) -> int:
        target = self.server.target
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=_TIMEOUT_S)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OWN_HEADERS:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while piece := answer.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()
        connection.close()
        self.close_connection = True
        return answer.status

    def log_message(self, *arguments: object) -> None:
        """Say nothing: what the script prints is read."""
