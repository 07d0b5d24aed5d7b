"""Counts of answers outlive their gateway, those of all gateways add up, and what is no such count is ignored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from nats.js import JetStreamContext

from gateway.telemetry import drift_watch
from gateway.telemetry.answer_counts import FORMAT, AnswerCounts, DayCounts
from gateway.telemetry.drift_watch import MAX_DOCUMENT_BYTES, DriftWatch
from shared.nats_connection import connect
from shared.streams import RESPONSES_STREAM, StreamLimits, ensure_streams
from shared.subjects import answers_subject
from tests.gateway.wire_worker import until

DAY_S = 86400.0


@pytest.fixture
async def js(nats_url: str) -> AsyncIterator[JetStreamContext]:
    nats = await connect(nats_url, role="gateway", name="g")
    await ensure_streams(nats.jetstream(), StreamLimits())
    await nats.jetstream().purge_stream(RESPONSES_STREAM, subject="hr.response._answers.>")
    yield nats.jetstream()
    await nats.close()


class Gateway:
    def __init__(self, js: JetStreamContext, name: str, now: float = 30 * DAY_S) -> None:
        self.now = now
        self.counts = AnswerCounts(lambda: self.now)
        self.watch = DriftWatch(js, name, self.counts, lambda: True, lambda: {"a", "b"})

    def answered(self, worker: str, number: int, length: int) -> None:
        for _ in range(number):
            self.counts.add(("m", worker, "r"), length, "stop", None)

    async def numbers(self) -> dict[tuple[str, str], tuple[int, int]]:
        return {(each.worker, each.compared_with): (each.answers, each.others) for each in await self.watch.findings()}


async def test_counts_survive_their_gateways_death_and_add_up(js: JetStreamContext) -> None:
    dead, other = Gateway(js, "gw-1"), Gateway(js, "gw-2")
    dead.answered("a", 60, 10)
    await dead.watch.store()
    dead.answered("a", 10, 10)
    await dead.watch.store()
    other.answered("a", 5, 10)
    other.answered("b", 80, 200)
    assert await other.numbers() == {("a", "fleet"): (75, 80), ("b", "fleet"): (80, 75)}
    samples = {tuple(s.labels.values()): s.value for family in other.watch.collect() for s in family.samples}
    assert {(worker, measure) for _, worker, _, measure in samples} == {
        (worker, measure) for worker in "ab" for measure in ("length", "finish")
    }
    assert samples["m", "a", "fleet", "length"] > 0.25 > samples["m", "a", "fleet", "finish"]
    (view, _) = await other.watch.view()
    assert (view["verdict"], view["psi"]["logprob"]) == ("differs", None)
    assert sorted((view["answers"], view["others"])) == [75, 80]


async def test_of_too_many_documents_those_of_living_gateways_are_read(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_watch, "MAX_DOCUMENTS", 2)
    for name in ("dead-1", "dead-2", "gw-2"):
        each = Gateway(js, name)
        each.answered("a" if name == "gw-2" else "dead", 60, 10)
        await each.watch.store()
    gateway = Gateway(js, "gw-1")
    gateway.watch = DriftWatch(js, "gw-1", gateway.counts, lambda: True, lambda: {"a", "b"}, lambda: {"gw-2"})
    gateway.answered("b", 70, 10)
    assert await gateway.numbers() == {("a", "fleet"): (60, 70), ("b", "fleet"): (70, 60)}


async def test_document_of_something_else_is_ignored(js: JetStreamContext) -> None:
    gateway = Gateway(js, "gw-1")
    gateway.answered("a", 60, 10)
    gateway.answered("b", 60, 10)
    today = gateway.counts.today
    (right,) = gateway.counts.documents()
    row = msgspec.to_builtins(right.rows[0])
    wrong: list[Any] = [
        DayCounts(FORMAT + 1, today, right.rows),
        DayCounts(FORMAT, "19990101", right.rows),
        (FORMAT, today, [[*row[:3], [1], *row[4:]]]),
        (FORMAT, today, [[*row[:3], [-1] * len(row[3]), *row[4:]]]),
        (FORMAT, today, [["m" * 129, *row[1:]]]),
        [],
    ]
    data = [b"", b"\xc1", b"x" * (MAX_DOCUMENT_BYTES + 1), *map(msgspec.msgpack.encode, wrong)]
    for number, each in enumerate(data):
        await js.publish(answers_subject(today, f"wrong-{number}"), each)
    assert await gateway.numbers() == {("a", "fleet"): (60, 60), ("b", "fleet"): (60, 60)}


async def test_yesterday_is_compared_and_days_before_are_deleted(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(js, "gw-1")
    for _ in range(3):
        gateway.answered("a", 60, 10)
        await gateway.watch.store()
        gateway.now += DAY_S
    gateway.now -= DAY_S
    assert await gateway.numbers() == {("a", "yesterday"): (60, 60)}
    assert len(gateway.counts.documents()) == 1
    monkeypatch.setattr(drift_watch, "INTERVAL_S", 0.01)
    watching = asyncio.create_task(gateway.watch.watch_forever())
    await until(lambda: bool(gateway.watch._swept))
    purged: list[str] = []

    async def purge(stream: str, subject: str) -> None:
        purged.append(subject)

    monkeypatch.setattr(js, "purge_stream", purge)
    await gateway.watch._sweep()
    assert not purged, "once a day"
    state = (await js.stream_info(RESPONSES_STREAM, subjects_filter=answers_subject("*", "gw-1"))).state
    assert sorted(state.subjects or {}) == [answers_subject(day, "gw-1") for day in ("19700201", "19700202")]
    watching.cancel()


def test_rows_of_a_day_are_bounded() -> None:
    counts = AnswerCounts(lambda: 0.0)
    for number in range(1000):
        counts.add(("m", f"w{number}", ""), 1, "stop", None)
    (document,) = counts.documents()
    data = msgspec.msgpack.encode(document)
    assert len(msgspec.msgpack.decode(data, type=DayCounts).rows) == 512
    assert len(data) < MAX_DOCUMENT_BYTES


async def test_day_that_begins_while_counts_are_stored_loses_none(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(js, "gw-1")
    gateway.answered("a", 60, 10)
    publish = js.publish

    async def publish_at_midnight(subject: str, payload: bytes) -> Any:
        gateway.now = 31 * DAY_S
        gateway.answered("a", 1, 10)
        return await publish(subject, payload)

    monkeypatch.setattr(js, "publish", publish_at_midnight)
    await asyncio.gather(gateway.watch.store(), gateway.watch.store())
    monkeypatch.setattr(js, "publish", publish)
    await gateway.watch.store()
    rows = [row for ago in (30, 31) for row in await gateway.watch._read(drift_watch.day_of(ago * DAY_S))]
    assert sum(sum(row.lengths) for row in rows) >= 61
