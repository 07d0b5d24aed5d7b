"""When streams that have nothing to tell yet are begun: not while they may still be refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admission.auth import Principal
from gateway.aliases.book import AliasBook
from gateway.api import generation_service
from gateway.api.answer import ResponseHead
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

    name, is_logged = "e", False

    def __init__(self, ticked: list[str]) -> None:
        self.answer = _Stream("new", False, ticked)
        self.is_admitted = asyncio.Event()

    async def generation(self, body: bytes, principal: object, rules: object) -> Generation:
        return Generation("completion", "m", (Prompt(1, text="x"),), 1, Sampling(), deterministic=False, stream=True)

    def streamed_answer(self, asked: object, parts: object) -> _Stream:
        return self.answer

    async def start(self, *arguments: object) -> object:
        await self.is_admitted.wait()
        return SimpleNamespace(
            leave=lambda: None, is_repeated=False, prediction=1, is_counted=False, is_counted_elsewhere=True
        )


async def _at_once(*arguments: object) -> Any:
    return arguments[0] if arguments else SimpleNamespace(headers={}, release=lambda tokens: None)


def _service(watch: SimpleNamespace) -> GenerationService:
    services = SimpleNamespace(
        config=GatewayConfig(),
        bodies=None,
        keys=SimpleNamespace(authenticate=lambda headers, notes: Principal("k", "t")),
        limiter=SimpleNamespace(admit=lambda *asked: _at_once()),
        metrics=GatewayMetrics(),
        body_rules=lambda principal, model: None,
        aliases=AliasBook(),
    )
    load = SimpleNamespace(fingerprint=None)
    fleet = SimpleNamespace(reported_load=lambda model: load, find_adapter=lambda model, tenant: None)
    dispatcher = SimpleNamespace(nats_watch=watch, fleet=fleet)
    record = SimpleNamespace(traceparent=None, tenant="t", key="k", parsed=lambda *read: None)
    observer = SimpleNamespace(begin=lambda *of: record, parsed=lambda record: None)
    parts: list[Any] = [services, dispatcher, None, None, observer, None]
    service = GenerationService(*parts)
    service._reading = cast("Any", SimpleNamespace(read=_at_once))
    return service


async def test_stream_is_not_begun_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    head = SimpleNamespace(headers=[], notes={})
    exchange = SimpleNamespace(head=head, read_body=lambda *bounds: _at_once(b""))
    service = _service(SimpleNamespace(owes_answer=False, is_connected=True))
    ticked: list[str] = []
    endpoint = _Endpoint(ticked)
    asking = asyncio.create_task(service.serve(*cast("Any", (endpoint, exchange, ResponseHead("", 0.0)))))
    ticking = asyncio.create_task(service.tick_forever())
    for _ in range(20):
        await asyncio.sleep(0)
    assert ticked == []
    endpoint.is_admitted.set()
    await until(lambda: "new" in ticked)
    for task in (asking, ticking):
        task.cancel()


@pytest.mark.parametrize(("owes_answer", "is_connected"), [(True, True), (False, False)])
async def test_stream_is_not_begun_while_nats_owes_an_answer_or_is_away(
    monkeypatch: pytest.MonkeyPatch, owes_answer: bool, is_connected: bool
) -> None:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    watch = SimpleNamespace(owes_answer=owes_answer, is_connected=is_connected)
    service = _service(watch)
    ticked: list[str] = []
    for name, has_begun in (("new", False), ("begun", True)):
        service._streamed.add(cast("Any", _Stream(name, has_begun, ticked)))
    ticking = asyncio.create_task(service.tick_forever())
    await until(lambda: len(ticked) > 5)
    assert set(ticked) == {"begun"}
    watch.owes_answer, watch.is_connected = False, True
    await until(lambda: "new" in ticked)
    ticking.cancel()
