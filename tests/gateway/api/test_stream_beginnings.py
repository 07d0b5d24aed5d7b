"""When streams that have nothing to tell yet are begun: not while they may still be refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admission.auth import Principal
from gateway.api import generation_service
from gateway.api.generation_service import GenerationService
from gateway.config import GatewayConfig
from gateway.generation import Generation, Prompt
from gateway.metrics import GatewayMetrics
from shared.sampling import Sampling
from tests.gateway.wire_worker import until


class _Stream:
    """An answer that notes when it is looked after."""

    sinks = ()

    def __init__(self, name: str, has_begun: bool, ticked: list[str]) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.has_begun = has_begun
        self._name = name
        self._ticked = ticked

    def tick(self, now: float) -> None:
        self._ticked.append(self._name)

    def make_ready(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Endpoint:
    """Asks for streams that are admitted when the test says so."""

    name, is_repeatable = "e", False

    def __init__(self, ticked: list[str]) -> None:
        self.answer = _Stream("new", False, ticked)
        self.is_admitted = asyncio.Event()

    async def generation(self, body: bytes, principal: object, rules: object) -> Generation:
        return Generation("completion", "m", (Prompt(1, text="x"),), 1, Sampling(), deterministic=False, stream=True)

    def streamed_answer(self, asked: object, parts: object) -> _Stream:
        return self.answer

    async def start(self, *arguments: object) -> object:
        await self.is_admitted.wait()
        return SimpleNamespace(leave=lambda: None, cache_key=None)


async def _at_once(*arguments: object) -> Any:
    return arguments[0] if arguments else SimpleNamespace(headers={}, release=lambda tokens: None)


async def test_stream_is_not_begun_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    principal = Principal("k", "t")
    head = SimpleNamespace(headers=[], notes={})
    exchange = SimpleNamespace(head=head, read_body=lambda *bounds: _at_once(b""))
    starter = SimpleNamespace(is_queue_late=False, with_reading=_at_once, fingerprint=lambda model: None)
    starter.repeated = SimpleNamespace(traits=lambda model: None)
    keys = SimpleNamespace(authenticate=lambda headers, notes: principal)
    limiter = SimpleNamespace(admit=lambda *asked: _at_once())
    parts: list[Any] = [keys, limiter, None, starter, GatewayMetrics(), None]
    service = GenerationService(GatewayConfig(), *parts)
    ticked: list[str] = []
    endpoint, record = _Endpoint(ticked), SimpleNamespace(traceparent=None, parsed=lambda *read: None)
    asking = asyncio.create_task(
        service._answer(*cast("Any", (endpoint, exchange, SimpleNamespace(request_id="", model=None), record)))
    )
    ticking = asyncio.create_task(service.tick_forever())
    for _ in range(20):
        await asyncio.sleep(0)
    assert ticked == []
    endpoint.is_admitted.set()
    await until(lambda: "new" in ticked)
    for task in (asking, ticking):
        task.cancel()


async def test_stream_is_not_begun_while_nats_owes_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    nothing, starter = cast("Any", None), SimpleNamespace(is_queue_late=True)
    service = GenerationService(
        GatewayConfig(), nothing, nothing, nothing, cast("Any", starter), GatewayMetrics(), nothing
    )
    ticked: list[str] = []
    for name, has_begun in (("new", False), ("begun", True)):
        service._streamed.add(cast("Any", _Stream(name, has_begun, ticked)))
    ticking = asyncio.create_task(service.tick_forever())
    await until(lambda: len(ticked) > 5)
    assert set(ticked) == {"begun"}
    starter.is_queue_late = False
    await until(lambda: "new" in ticked)
    ticking.cancel()
