"""Start the whole system as a user would, `headrace up`, and know it only through its ready file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class System:
    """A running system, as its ready file describes it."""

    process: subprocess.Popen[bytes]
    ready_file: Path
    log: Path
    opened: ExitStack = field(default_factory=ExitStack)

    @property
    def info(self) -> dict[str, Any]:
        """Return the ready file's content, which follows restarts of children."""
        return json.loads(self.ready_file.read_text())

    @property
    def url(self) -> str:
        return self.info["url"]

    @cached_property
    def model(self) -> str:
        answer = httpx2.get(f"{self.url}/v1/models", headers=self.headers())
        return str(answer.json()["data"][0]["id"])

    @cached_property
    def _client(self) -> openai.OpenAI:
        # Making one takes a tenth of a second.
        return self._opened_client()

    def metrics(self) -> str:
        """Return what Prometheus would scrape."""
        info = self.info
        answer = httpx2.get(info["metrics_url"], headers={"Authorization": f"Bearer {info['operator_key']}"})
        assert answer.status_code == 200, answer.text
        return answer.text

    def gauge(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.metrics().splitlines() if line.startswith(name))

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.info['api_key']}"}

    def post(self, path: str, body: object) -> httpx2.Response:
        """Send a body with the system's key."""
        return httpx2.post(f"{self.url}{path}", headers=self.headers(), json=body, timeout=120)

    def operator(self, path: str, body: object = None) -> httpx2.Response:
        """Send a body with the operator's key to the operator's port, or ask there without one."""
        url, key = self.info["metrics_url"].removesuffix("/metrics"), self.info["operator_key"]
        method = "GET" if body is None else "POST"
        return httpx2.request(method, url + path, headers={"Authorization": f"Bearer {key}"}, json=body, timeout=120)

    def client(self, **options: Any) -> openai.OpenAI:
        """Return a client that is closed together with the system: a collected socket would fail another test."""
        return self._opened_client(**options) if options else self._client

    def _opened_client(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(**self._client_settings() | options)
        self.opened.callback(client.close)
        return client

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_settings() | options)

    def _client_settings(self) -> dict[str, Any]:
        info = self.info
        return {"base_url": f"{info['url']}/v1", "api_key": info["api_key"], "max_retries": 0, "timeout": 60.0}


@contextmanager
def running_system(directory: Path, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[System]:
    """Run `headrace up` with these arguments on free ports until the block ends, then stop it as Ctrl-C would."""
    ready = directory / "ready.json"
    log = directory / "up.log"
    command = [sys.executable, "-m", "ops.cli", "up", "--port", "0", "--state-dir", str(directory / "state")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--ready-file", str(ready), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environ or {}),
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, ready, log)
        system = System(process, ready, log)
        with system.opened:
            yield system
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                pytest.fail(f"`headrace up` did not stop:\n{log.read_text()[-3000:]}")


def _wait_until_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"`headrace up` did not become ready:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)
