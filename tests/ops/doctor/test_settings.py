"""Settings as the page shows them: without secrets, and otherwise as they are."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from ops.doctor.finding import Level, page
from ops.doctor.settings import (
    file_findings,
    gateway_findings,
    place_of,
    redis_finding,
    setting_findings,
    shown_value,
)
from shared.files import AtomicFile
from tests.servers import RedisServer


def test_url_without_secrets_is_shown_as_it_is() -> None:
    for url in ("http://h:4318/v1/traces", "nats://a:4222,nats://b:4222", "tls://[::1]:4222"):
        assert shown_value("HEADRACE_OTLP_ENDPOINT", url) == url
    assert place_of("nats://u:p@a:1,tls://b:2") == "a:1, b:2"
    assert shown_value("HEADRACE_MODEL", "Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B@main"


def test_secrets_are_hidden_wherever_they_stand() -> None:
    assert shown_value("HEADRACE_API_KEY", "hr-1") == "(hidden)"
    assert shown_value("HEADRACE_NATS_PASSWORD", "") == "(empty)"
    assert shown_value("HEADRACE_KEYS_FILE", "/a/keys.json") == "/a/keys.json"
    assert shown_value("HEADRACE_NATS_URL", "nats://u:p@a:4222,nats://u:p@b:4222").count("(hidden)@") == 2
    assert "secret" not in page(
        list(setting_findings({"HEADRACE_REDIS_URL": "redis://:secret@h/0", "HF_TOKEN": "secret"})), str
    )


def test_store_that_works_is_named_and_one_that_is_nearly_full_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_findings(None, tmp_path) == []
    (found,) = file_findings(str(tmp_path / "files"), tmp_path)
    assert (found.level, found.text.startswith(f"the directory {tmp_path}/files can be written")) == (Level.FINE, True)
    assert file_findings(None, tmp_path) == [found]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    assert [(each.level, "5 MB free" in each.text) for each in file_findings(None, tmp_path)][1:] == [
        (Level.WARNING, True)
    ]


def test_store_that_was_used_and_is_full_now_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "files")
    (found,) = file_findings(place, tmp_path)
    assert found.level is Level.FINE

    def write(self: AtomicFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(AtomicFile, "write", write)
    (found,) = file_findings(place, tmp_path)
    assert (found.level, "No space left" in found.text) == (Level.PROBLEM, True)


@pytest.mark.parametrize("files", ["gs://bucket", "s3://", "file/below"])
def test_store_that_cannot_be_used_is_a_problem(tmp_path: Path, files: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    place = files if "://" in files else str(tmp_path / files)
    (found,) = file_findings(place, tmp_path)
    assert found.level is Level.PROBLEM
    assert found.remedy


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


def test_doctor_needs_no_package_of_a_worker() -> None:
    names = ["numpy", "safetensors", "tokenizers", "torch"]
    code = f"import sys; sys.modules.update(dict.fromkeys({names})); from ops.doctor import machine, nats, settings"
    subprocess.run([sys.executable, "-c", code], check=True)
