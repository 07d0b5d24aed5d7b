"""When streams that have nothing to tell yet are begun: not while they may still be refused."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.api import generation_service
from tests.gateway.api.test_given_back import Answered, Requests
from tests.gateway.wire_worker import until


@pytest.fixture
async def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    return Requests()


async def test_stream_is_not_begun_before_it_is_admitted(requests: Requests) -> None:
    requests.is_admitted.clear()
    tasks = [asyncio.create_task(requests.ask()), asyncio.create_task(requests.service.tick_forever())]
    await until(lambda: requests.answers)
    for _ in range(20):
        await asyncio.sleep(0)
    (answer,) = requests.answers
    assert answer.num_ticks == 0
    requests.is_admitted.set()
    await until(lambda: answer.num_ticks > 0)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(("owes_answer", "is_connected"), [(True, True), (False, False)])
async def test_stream_is_not_begun_while_nats_owes_an_answer_or_is_away(
    requests: Requests, owes_answer: bool, is_connected: bool
) -> None:
    requests.watch.owes_answer, requests.watch.is_connected = owes_answer, is_connected
    new, begun = Answered(), Answered()
    new.has_begun = False
    requests.service._streamed |= cast("Any", {new, begun})
    ticking = asyncio.create_task(requests.service.tick_forever())
    await until(lambda: begun.num_ticks > 5)
    assert new.num_ticks == 0
    requests.watch.owes_answer, requests.watch.is_connected = False, True
    await until(lambda: new.num_ticks > 0)
    ticking.cancel()
