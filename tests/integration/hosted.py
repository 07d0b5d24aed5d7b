"""Models of hosts as an operator orders them, and clients that ask without a pause."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.integration.system import System
from tests.waiting import wait_for


def operator(system: System, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
    return system.operator(f"/v1/hosted_models{path}", body)


def order(system: System, action: str, name: str, **fields: Any) -> None:
    answer = operator(system, f"/{action}", {"name": name, **fields})
    assert answer.status_code == 200, answer.text


def shown(system: System, name: str) -> dict[str, Any]:
    models = [model for host in operator(system, "").json()["hosts"] for model in host["models"]]
    return next((model for model in models if model["name"] == name), {"state": "unknown", "num_ready": 0})


def wait_for_state(system: System, name: str, state: str, timeout_s: float = 60.0) -> None:
    wait_for(lambda: shown(system, name)["state"] == state, timeout_s, lambda: operator(system, "").text)


@contextmanager
def load_on(ask_one: Callable[[int], None], num_clients: int = 6) -> Iterator[list[int]]:
    """Have clients ask one after the other until the block ends; each answer is checked. Yields what was answered."""
    stop, answered, numbers = threading.Event(), [], itertools.count()

    def client() -> None:
        while not stop.is_set():
            number = next(numbers)
            ask_one(number)
            answered.append(number)

    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(client) for _ in range(num_clients)]
        try:
            yield answered
        finally:
            stop.set()
        for each in clients:
            each.result()
    sys.stdout.write(f"{len(answered)} requests of {num_clients} clients, each answered\n")
