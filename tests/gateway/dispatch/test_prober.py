"""Probes over a real NATS: a worker that answers, one that is frozen, and one that is not there."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from gateway.dispatch import sweep
from gateway.dispatch.sweep import Prober
from shared.nats_connection import connect
from shared.subjects import probe_subject
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
