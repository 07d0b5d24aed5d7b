"""Lookups of hosts hold no thread but their own, and a tenant only a few of these."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.media.fetch import MAX_LOOKUPS_OF_ONE, HostLookup
from tests.waiting import until


class SlowNames:
    """A resolver that answers when it may. Hosts in the order in which they were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host)
        assert self.may_answer.wait(60)
        return [(0, 0, 0, "", ("192.0.2.1", 443))]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlowNames]:
    names = SlowNames()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    yield names
    names.may_answer.set()


async def test_names_that_are_answered_late_hold_no_thread_of_others(names: SlowNames) -> None:
    lookup = HostLookup()
    for number in range(40):
        waiting = asyncio.create_task(lookup.addresses("evil", f"{number}.test", 443))
        await until(lambda number=number: len(names.asked) >= min(number + 1, MAX_LOOKUPS_OF_ONE))  # type: ignore[misc]
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert len(names.asked) == MAX_LOOKUPS_OF_ONE, "a lookup that was given up has given back its thread"
    assert await asyncio.to_thread(lambda: 1) == 1
    other = asyncio.create_task(lookup.addresses("good", "good.test", 443))
    await until(lambda: "good.test" in names.asked)
    names.may_answer.set()
    assert await other == ["192.0.2.1"]
    assert await lookup.addresses("evil", "last.test", 443) == ["192.0.2.1"]
