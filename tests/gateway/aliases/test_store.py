"""Several gateways share one table: nothing is lost, counts add up, and one of them rolls a canary back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from gateway.aliases.book import AliasBook
from gateway.aliases.comparison import ArmCounts, BothArms, look_of
from gateway.aliases.store import AliasStore
from gateway.aliases.table import (
    Alias,
    AliasTable,
    Rules,
    end_canary,
    remove_alias,
    set_alias,
    set_percent,
    start_canary,
)
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from shared.direct_client import DirectClient
from shared.messages import UNDECODABLE
from shared.nats_connection import connect
from shared.streams import ALIASES_STREAM, StreamLimits, ensure_stream
from shared.subjects import ALIAS_CHANGED, ALIASES
from tests.servers import NatsServer
from tests.waiting import until


def is_served(name: str) -> bool:
    return name in {"one", "two"}


@dataclass
class Gateway:
    """One process's view."""

    nats: DirectClient
    store: AliasStore
    book: AliasBook
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)

    @property
    def alias(self) -> Alias | None:
        return self.book.table.find("chat", None)

    def count(self, stable: ArmCounts, canary: ArmCounts) -> None:
        """Count requests of the canary of `chat`, in place of the counted requests."""
        assert self.alias is not None
        assert self.alias.canary is not None
        self.book.own[self.alias.canary.id] = BothArms(stable, canary)

    def known(self) -> tuple[int, int]:
        """Return how many requests of the two arms it knows of."""
        assert self.alias is not None
        assert self.alias.canary is not None
        arms = self.store.counts(self.alias.canary.id)
        return arms.stable.requests, arms.canary.requests


Make = Callable[[str], Awaitable[Gateway]]


@pytest.fixture
async def make(nats: NatsServer, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes gateways at a NATS server of the test's own."""
    async with AsyncExitStack() as stack:

        async def gateway(name: str) -> Gateway:
            client = await connect(nats.url, role="gateway", name=name)
            stack.push_async_callback(client.close)
            await ensure_stream(client.jetstream(), ALIASES_STREAM, StreamLimits())
            book, metrics = AliasBook(), GatewayMetrics()
            store = AliasStore(client, name, book, metrics, tmp_path / "audit.jsonl")
            await store.start()
            return Gateway(client, store, book, metrics)

        yield gateway


async def set_chat(gateway: Gateway, name: str = "chat") -> None:
    await gateway.store.change(lambda table: set_alias(table, name, "one", None, is_served, is_served, 5.0))


async def start(gateway: Gateway, min_requests: int = 40) -> None:
    begin = partial(start_canary, rules=Rules(min_requests=min_requests), now=0.0, is_served=is_served)
    await gateway.store.change(lambda table: begin(table, "chat", None, "two", 50.0))


async def test_changes_at_the_same_time_are_all_kept_and_known_everywhere(make: Make) -> None:
    first, second = await make("g1"), await make("g2")
    await asyncio.gather(*(set_chat((first, second)[n % 2], f"alias-{n}") for n in range(6)))
    for each in (first, second, await make("g3")):
        await each.store.sync()
        assert [alias.name for alias in each.book.table.aliases] == [f"alias-{n}" for n in range(6)]


async def test_gateway_hears_of_a_change_without_asking(make: Make) -> None:
    first, second = await make("g1"), await make("g2")
    watching = asyncio.create_task(second.store.watch_forever())
    try:
        await set_chat(first)
        async with asyncio.timeout(30):
            while second.alias is None:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0.005)
    finally:
        watching.cancel()


async def test_worse_canary_is_rolled_back_once_by_what_all_gateways_counted(make: Make, tmp_path: Path) -> None:
    gateways = [await make(f"g{n}") for n in range(3)]
    await set_chat(gateways[0])
    await start(gateways[0])
    for each in gateways:
        await each.store.sync()
        # No gateway alone has counted enough to judge.
        each.count(ArmCounts(requests=30), ArmCounts(requests=30, errors=20))
    for _ in range(2):
        await asyncio.gather(*(each.store.sync() for each in gateways))
    for each in gateways:
        await each.store.sync()
        assert each.alias is not None
        assert each.alias.canary is not None
        assert (each.alias.model, each.alias.running, each.alias.canary.state) == ("one", None, "rolled_back")
        assert "66.67% of the canary's answers failed" in each.alias.canary.reason
        assert each.known() == (90, 90)
    assert sum(each.metrics.canary_rollbacks["errors"] for each in gateways) == 1
    (line,) = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert (line["action"], line["outcome"]) == ("canary.rollback", "done")
    assert line["what"] | {"reason": ""} == {
        "by": "comparison",
        "alias": "chat",
        "tenant": None,
        "canary": "two",
        "reason": "",
    }
    # Nothing is kept of a canary whose alias is gone.
    await gateways[0].store.change(lambda table: remove_alias(table, "chat", None))
    for each in gateways:
        await each.store.sync()
        store = each.store
        assert [store._others, store._read_to, store._sent, store._looks] == [{}] * 4


async def test_restarted_gateway_goes_on_with_the_share_and_the_counts(make: Make) -> None:
    first = await make("g1")
    await set_chat(first)
    await start(first)
    first.count(ArmCounts(requests=10), ArmCounts(requests=15))
    await first.store.sync()
    await first.nats.close()
    again = await make("g2")
    await again.store.sync()
    again.count(ArmCounts(requests=1), ArmCounts(requests=2))
    assert again.known() == (11, 17)
    await again.store.change(lambda table: set_percent(table, "chat", None, 75.0))
    assert again.alias is not None
    assert again.alias.running is not None
    assert again.alias.running.percent == 75.0
    assert again.known() == (11, 17)


async def test_answers_that_ran_when_a_canary_ended_are_counted(make: Make) -> None:
    first, second = await make("g1"), await make("g2")
    await set_chat(first)
    await start(first)
    first.count(ArmCounts(requests=10), ArmCounts(requests=15))
    await first.store.sync()
    await second.store.sync()
    await second.store.change(lambda table: end_canary(table, "chat", None, "promoted", "", 2e10))
    first.count(ArmCounts(requests=10), ArmCounts(requests=16))
    await first.store.sync()
    await second.store.sync()
    assert second.known() == (10, 16)
    assert second.alias is not None
    assert second.alias.model == "two"


async def test_lost_stream_comes_back_with_its_table(make: Make) -> None:
    first, second = await make("g1"), await make("g2")
    await set_chat(first)
    await start(first)
    await second.store.sync()
    second.count(ArmCounts(requests=3), ArmCounts(requests=4))
    await second.store.sync()
    await first.nats.jetstream().delete_stream(ALIASES_STREAM)
    for each in (first, second, first):
        await each.store.sync()
        assert each.alias is not None
    assert first.known() == (3, 4)
    await set_chat(first, "more")
    await second.store.sync()
    assert len(second.book.table.aliases) == 2


async def test_table_that_cannot_be_read_leaves_the_one_that_is_known(make: Make) -> None:
    first = await make("g1")
    await set_chat(first)
    fields = msgspec.to_builtins(first.book.table)
    fields["aliases"][0]["name"] = "x" * 129
    await first.nats.jetstream().publish(ALIASES, msgspec.msgpack.encode(fields))
    with pytest.raises(UNDECODABLE):
        await first.store.sync()
    with pytest.raises(ApiError, match="cannot be read") as refused:
        await set_chat(first, "other")
    assert refused.value.status == 503
    assert first.alias is not None
    # One that starts has no aliases, and serves models.
    assert (await make("g2")).book.table == AliasTable()


async def test_lie_about_counts_is_not_believed_and_stops_nothing(make: Make) -> None:
    first = await make("g1")
    await set_chat(first)
    await start(first)
    first.count(ArmCounts(requests=10), ArmCounts(requests=15))
    assert first.alias is not None
    assert first.alias.canary is not None
    lie = {"stable": {"requests": 5}, "canary": {"requests": -5}}
    subject = f"hr.canary.{first.alias.canary.id}.liar"
    await first.nats.jetstream().publish(subject, msgspec.msgpack.encode(lie))
    await first.store.sync()
    assert first.known() == (10, 15)


async def test_change_says_that_nats_is_away(make: Make, nats: NatsServer) -> None:
    first = await make("g1")
    nats.kill()
    with pytest.raises(ApiError, match="NATS is away") as refused:
        await set_chat(first)
    assert (refused.value.status, refused.value.code) == (503, "aliases_unavailable")
    # Closing a client that is about to connect again may hang.
    nats.restart()
    await until(lambda: first.nats.is_connected)


async def test_table_too_large_for_a_message_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await make("g1")
    await set_chat(first)
    monkeypatch.setattr(DirectClient, "max_payload", 1024 + 60)
    with pytest.raises(ApiError, match="NATS takes 60") as refused:
        await set_chat(first, "a-second-alias")
    assert refused.value.status == 400


async def test_change_that_comes_while_the_table_is_read_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def subscribe(subject: str, cb: object) -> None:
        done.append(subject)

    async def read(self: AliasStore) -> None:
        done.append("read")

    nats = Mock(subscribe=subscribe)
    monkeypatch.setattr(AliasStore, "_read", read)
    await AliasStore(nats, "g", AliasBook(), GatewayMetrics(), None).start()
    assert done == [ALIAS_CHANGED, "read"]


async def test_same_counts_are_compared_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def judge(arms: BothArms, rules: Rules, look: int) -> None:
        judged.append(look)

    monkeypatch.setattr("gateway.aliases.store.reason_to_roll_back", judge)
    gateway = await make("g1")
    await set_chat(gateway)
    await start(gateway)
    for num_requests in (10, 40, 40, 41, 5000):
        gateway.count(ArmCounts(requests=num_requests), ArmCounts(requests=num_requests))
        await gateway.store.sync()
    assert judged == [0, look_of(5000, Rules(min_requests=40))]
