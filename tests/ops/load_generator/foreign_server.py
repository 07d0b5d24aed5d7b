"""A small server of OpenAI's API that is not ours, with the faults that servers have, one after the other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_PROBES = 2


class ForeignServer(ThreadingHTTPServer):
    """Answers the probes well, then each request by the next of `answers`, the last one for all that follow.

    Attributes:
        bodies: Of the requests after the probes.
        arrived: Released once for each of them.
    """

    daemon_threads = True

    def __init__(self, answers: Sequence[str], delay_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = ["good"] * NUM_PROBES + list(answers)
        self.delay_s = delay_s
        self.bodies: list[dict[str, Any]] = []
        self.num_asked = 0
        self.lock = threading.Lock()
        self.arrived = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_answer(self, body: dict[str, Any]) -> str:
        with self.lock:
            answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
            self.num_asked += 1
            if self.num_asked > NUM_PROBES:
                self.bodies.append(body)
                self.arrived.release()
            return answer


@contextmanager
def foreign_server(*answers: str, delay_s: float = 0.0) -> Iterator[ForeignServer]:
    with ForeignServer(answers, delay_s) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: ForeignServer

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "theirs"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.server.next_answer(body)
        time.sleep(self.server.delay_s)
        match answer:
            case "busy":
                self._whole(503, {"error": {"message": "full"}}, {"Retry-After": "7"})
            case "broken":
                self._whole(500, {"error": {"message": "no memory"}})
            case "not a stream":
                self._whole(200, {"choices": [{"text": "all at once"}]})
            case "gone":
                pass
            case "hangs":
                time.sleep(5)
            case _:
                self._stream(answer, body)

    def _stream(self, answer: str, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in ("one ", "two ", "three "):
            choice = {"delta": {"content": word}} if "messages" in body else {"text": word}
            self._event({"choices": [choice]})
        if answer == "cut":
            return
        if answer == "nonsense":
            self.wfile.write(b"data: <html>\n\n")
        if answer == "error":
            self._event({"error": {"message": "out of memory"}})
        if answer != "no usage":
            # Two tokens a word, and ten of a template.
            words = len(json.dumps(body.get("prompt") or body["messages"]).split())
            self._event({"choices": [], "usage": {"prompt_tokens": 10 + 2 * words, "completion_tokens": 6}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _whole(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items() | {("Content-Length", str(len(data)))}:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass
