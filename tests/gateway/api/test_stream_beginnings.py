"""When streams that have nothing to tell yet are begun: not while they may still be refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api import generation_service
from gateway.api.generation_service import GenerationService
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from tests.gateway.wire_worker import until


class _Stream:
    """An answer that notes when it is looked after."""

    def __init__(self, name: str, has_begun: bool, ticked: list[str]) -> None:
        self.has_begun = has_begun
        self._name = name
        self._ticked = ticked

    def tick(self, now: float) -> None:
        self._ticked.append(self._name)


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
