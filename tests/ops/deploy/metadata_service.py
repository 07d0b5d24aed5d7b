"""The metadata service of a spot machine on AWS that will be taken away, at its well-known address."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer


class Metadata(BaseHTTPRequestHandler):
    """Gives a token, and the notice to clients that send it."""

    def do_PUT(self) -> None:
        self._answer(200, b"token" if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers else b"")

    def do_GET(self) -> None:
        is_notice = self.path == "/latest/meta-data/spot/instance-action"
        is_known = self.headers.get("X-aws-ec2-metadata-token") == "token"
        notice = b'{"action": "terminate", "time": "2026-01-01T00:02:00Z"}'
        self._answer(200, notice) if is_notice and is_known else self._answer(404, b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    HTTPServer(("169.254.169.254", 80), Metadata).serve_forever()
