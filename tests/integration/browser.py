"""Headless Chromium, driven over pipes by its DevTools protocol: a person's hands and eyes for tests of pages."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_KEYS = {"Enter": ("Enter", 13, "\r"), "Tab": ("Tab", 9, "")}


class Page:
    """One tab. What the page says in its console, and what it fails at, is in `problems`."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                return dict(told["result"])
            self._note(told)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._reading], [], [], 60)[0], "Chromium does not answer"
            piece = os.read(self._reading, 1 << 16)
            assert piece, "Chromium has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, told: dict[str, Any]) -> None:
        parameters = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        if told.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """Evaluate an expression in the page; a promise is waited for."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true; a failure shows what stands on the page."""
        return wait_for(lambda: self.run(expression), timeout_s, lambda: (self.text(), self.problems))

    def wait_text(self, text: str, selector: str = "body") -> None:
        self.wait(f"(document.querySelector({json.dumps(selector)})?.innerText ?? '').includes({json.dumps(text)})")

    def click(self, selector: str, text: str = "") -> None:
        """Click in the middle of the first element that is visible and has a text."""
        find = f"""[...document.querySelectorAll({json.dumps(selector)})].find((each) =>
            each.getClientRects().length && each.textContent.includes({json.dumps(text)}))"""
        self.wait(f"Boolean({find})")
        self.run(f"{find}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"(({find}).getBoundingClientRect()).toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        name, code, text = _KEYS.get(key, (key, ord(key[0].upper()), key))
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if kind == "keyDown" and text and not modifiers else {}
            options = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.call("Input.dispatchKeyEvent", type=kind, **options, **more)

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )


@contextmanager
def browsing(directory: Path) -> Iterator[Page]:
    """Start Chromium with a profile of its own until the block ends."""
    assert CHROMIUM is not None
    commands, answers = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [CHROMIUM, *options, *quiet, "--remote-debugging-pipe", f"--user-data-dir={directory / 'profile'}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{commands[0]} 4>&{answers[1]}', "bash", *command],
        pass_fds=(commands[0], answers[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands[0])
    os.close(answers[1])
    try:
        yield Page(answers[0], commands[1])
    finally:
        os.close(commands[1])
        os.close(answers[0])
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
