"""Processes ask one another for what each keeps; one that does not answer is left out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.timelines import exchange as exchange_module
from gateway.timelines.exchange import TimelineExchange
from shared.nats_connection import connect
from shared.subjects import timeline_subject
from shared.timeline import GatewayCounts, Order, Summary, Timeline


class Keeper:
    """Keeps one request, which began at `began`."""

    def __init__(self, gateway: str, began: float) -> None:
        self.gateway = gateway
        self.began = began
        self.asked: list[tuple[str, int]] = []

    def find(self, request_id: str) -> list[Timeline]:
        kept = Timeline(id="r", gateway=self.gateway, began=self.began)
        return [kept] if request_id == kept.id else []

    def summaries(self, order: Order, limit: int) -> list[Summary]:
        self.asked.append((order, limit))
        told = {"tenant": "t", "model": "m", "route": "chat", "status": 200, "outcome": "completed"}
        return [Summary(id=self.gateway, began=self.began, ended_s=0.9 - self.began / 10, **told)]  # type: ignore[arg-type]


@pytest.fixture
async def exchanges(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[TimelineExchange]]:
    """Three processes that know of one another, of one that is dead, and of one that answers nonsense."""
    monkeypatch.setattr(exchange_module, "TIMEOUT_S", 30.0)
    names = ["g1", "g2", "g3"]
    async with AsyncExitStack() as stack:
        made = []
        for began, name in enumerate(names, start=1):
            client = await connect(nats_url, role="gateway", name=name)
            stack.push_async_callback(client.close)
            others = {*names, "dead", "other"} - {name}
            keeper: Any = Keeper(name, float(began))
            counts = GatewayCounts(gateway=name, streams=began)
            made.append(TimelineExchange(client, keeper, lambda others=others: others, lambda counts=counts: counts))
            await made[-1].start()
            await client.flush()

        async def answer(message: Any) -> None:
            await message.respond(b"nonsense")

        await client.subscribe(timeline_subject("other"), cb=answer)
        await client.publish(timeline_subject("g1"), b"nonsense")
        await client.flush()
        yield made


async def test_requests_and_counts_of_all_processes_are_told_by_each(exchanges: list[TimelineExchange]) -> None:
    for exchange in exchanges:
        assert [each.gateway for each in await exchange.find("r")] == ["g3", "g2", "g1"]
        assert await exchange.find("unknown") == []
        assert [each.id for each in await exchange.summaries("recent", 2)] == ["g3", "g2"]
        assert [each.id for each in await exchange.summaries("slow", 3)] == ["g1", "g2", "g3"]
        assert [(each.gateway, each.streams) for each in await exchange.counts()] == [("g1", 1), ("g2", 2), ("g3", 3)]
    keepers: list[Any] = [exchange._keeper for exchange in exchanges]
    assert [keeper.asked for keeper in keepers] == [[("recent", 2), ("slow", 3)] * 3] * 3
