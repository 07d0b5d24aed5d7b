"""What is said of Redis and a gateway, with real servers."""

from __future__ import annotations

import asyncio
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ops.doctor.finding import Level, page
from ops.doctor.preflight import gateway_findings, redis_finding
from ops.doctor.settings import setting_findings
from tests.servers import RedisServer


@pytest.mark.parametrize(
    "url",
    [
        "redis://:sec/ret@h:1/0",
        "nats://u:sec@ret@h:1",
        "nats://u:sec ret@h:1",
        "nats://u:sec,ret@h:1",
        "nats://u:sec?ret@h:1",
        "u:secret@h:1",
        "nats://u:x@g:1,u:secret@h:1",
        "redis://h:1/0?password=secret",
        "redis://h:1/0?password=sec@ret",
    ],
)
def test_login_of_a_badly_written_url_is_hidden_everywhere(url: str) -> None:
    findings = [*setting_findings({"HEADRACE_NATS_URL": url}), *gateway_findings(url), asyncio.run(redis_finding(url))]
    shown = page(findings, str)
    assert not re.search("sec|ret(?!r)", shown), shown


async def test_redis_that_refuses_the_password_is_a_warning(tmp_path: Path) -> None:
    with RedisServer(tmp_path, ("--requirepass", "right")).running() as server:
        url = f"redis://:right@127.0.0.1:{server.port}/0"
        assert (await redis_finding(url)).level is Level.FINE
        refused = await redis_finding(url.replace("right", "wrong-one"))
    assert refused.level is Level.WARNING
    assert "invalid username-password" in refused.text
    assert "wrong-one" not in refused.text


@pytest.mark.parametrize(
    ("status", "body", "level", "text", "remedy"),
    [
        (200, "ok", Level.FINE, "is ready", ""),
        (503, '{"reason": "no_queue"}', Level.PROBLEM, "is not ready (503): {", "see `nats` above"),
        (503, '{"reason": "no_worker"}', Level.PROBLEM, "is not ready (503): {", "see `workers` above"),
    ],
)
def test_gateway_says_whether_it_is_ready(status: int, body: str, level: Level, text: str, remedy: str) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request).start()
        (finding,) = gateway_findings(f"http://127.0.0.1:{server.server_port}")
    assert (finding.topic, finding.level, finding.remedy) == ("gateway", level, remedy)
    assert text in finding.text


@pytest.mark.parametrize(
    ("url", "level", "text"),
    [
        (None, Level.FINE, "not used: no shared cache, limits count per gateway"),
        ("http://h", Level.PROBLEM, "its URL "),
        ("redis://127.0.0.1:1/0", Level.WARNING, "127.0.0.1:1/0 cannot be used: "),
    ],
)
async def test_redis_that_is_not_there_is_told(url: str | None, level: Level, text: str) -> None:
    finding = await redis_finding(url)
    assert finding.level is level
    assert finding.text.startswith(text)
