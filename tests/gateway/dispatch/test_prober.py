"""Probes over a real NATS: a worker that answers, one that is frozen, and one that is not there."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from gateway.dispatch import sweep
from gateway.dispatch.nats_watch import NatsWatch
from gateway.dispatch.sweep import Prober, Sweep
from shared.nats_connection import connect
from shared.subjects import probe_subject
from tests.gateway.dispatch.test_nats_watch import Connection
from tests.gateway.fleet.test_fleet import Watched
from tests.gateway.wire_worker import until


class Told:
    """What the liveness of workers is told."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, float]] = []
        self.absences: list[tuple[str, float]] = []
        self.liveness = cast(
            "Any",
            SimpleNamespace(
                note_answer=lambda worker, now: self.answers.append((worker, now)),
                note_absence=lambda worker, probed_at: self.absences.append((worker, probed_at)),
            ),
        )


@pytest.fixture
async def nats(nats_url: str) -> AsyncIterator[Client]:
    nats = await connect(nats_url, role="gateway", name="g")
    yield nats
    await nats.close()


async def test_answers_and_absences_are_told_apart(nats: Client) -> None:
    told, name = Told(), uuid.uuid4().hex[:8]
    prober = Prober(nats, told.liveness)
    await prober.start()

    async def answer(message: Msg) -> None:
        await message.respond(b"")

    async def ignore(message: Msg) -> None:
        pass

    await nats.subscribe(probe_subject(f"well-{name}"), cb=answer)
    await nats.subscribe(probe_subject(f"frozen-{name}"), cb=ignore)
    await nats.flush()
    began = prober._loop.time()
    for kind in ("gone", "frozen", "well"):
        await prober.probe(f"{kind}-{name}", 12.5)
    await until(lambda: told.answers and told.absences)
    ((worker, answered_at),) = told.answers
    assert worker == f"well-{name}"
    assert began <= answered_at <= prober._loop.time()
    assert told.absences == [(f"gone-{name}", 12.5)]
    # An answer counts once, and one to nothing never.
    assert [worker for worker, _ in prober._waiting.values()] == [f"frozen-{name}"]
    await prober._receive(Msg(nats, subject=f"{prober._inbox}.99", data=b""))
    assert (len(told.answers), len(told.absences)) == (1, 1)


async def test_nats_is_pinged_before_a_silent_worker_is_probed_and_never_for_one_that_beats(
    nats: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    class Recorded(Connection):
        async def ping(self) -> asyncio.Future[bool]:
            said.append("ping")
            return await super().ping()

    class RecordedProber(Prober):
        async def probe(self, worker: str, now: float) -> None:
            said.append(worker)
            await super().probe(worker, now)

    watched = Watched()
    fleet = watched.fleet
    looks = Sweep(fleet, NatsWatch(cast("Any", Recorded())), RecordedProber(nats, fleet.liveness), cast("Any", None))
    for _ in range(20):
        watched.now += 0.1
        watched.hear(worker="w")
        await looks._sweep_fleet(watched.now)
    assert said == []
    for _ in range(20):
        watched.now += 0.1
        await looks._sweep_fleet(watched.now)
    assert said[:2] == ["ping", "w"]


async def test_probes_that_are_remembered_are_bounded(nats: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MAX_WAITING", 2)
    prober = Prober(nats, Told().liveness)
    for worker in ("a", "b", "c"):
        await prober.probe(worker, 0.0)
    assert [worker for worker, _ in prober._waiting.values()] == ["b", "c"]


async def test_connection_that_is_away_is_no_reason_to_fail(nats_url: str, caplog: pytest.LogCaptureFixture) -> None:
    nats = await connect(nats_url, role="gateway", name="g")
    prober = Prober(nats, Told().liveness)
    await nats.close()
    await prober.probe("w", 0.0)
    assert "worker w could not be probed" in caplog.text
