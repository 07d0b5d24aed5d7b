"""Who looks for the owner of a stream, and who waits for that."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.errors import NoRespondersError

from gateway.resumable import calls
from gateway.resumable.calls import OwnerCalls, OwnerReply
from tests.gateway.resumable.test_orphans import head

pytestmark = pytest.mark.timeout(20)


async def test_follower_that_comes_as_a_search_ends_without_a_verdict_calls_the_owner_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Awaiting a search that has ended lets nothing else run, so it must not be there any more."""
    heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def call(nats: object, subject: str, payload: bytes, timeout_s: float) -> Any:
        if payload:
            return SimpleNamespace(data=b"1 7")
        return await heard

    monkeypatch.setattr(calls, "call_process", call)
    owners = OwnerCalls(cast("Any", None), lambda call: None)
    looking = asyncio.create_task(owners.is_dead("o"))
    for _ in range(3):
        await asyncio.sleep(0)
    # In one turn of the loop: the search has its answer and ends, and then the follower asks.
    heard.set_result(None)
    following = asyncio.create_task(owners.ask(head("s", "o"), "watch"))
    assert await following == OwnerReply(True, 7)
    assert not await looking


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"1 7", OwnerReply(True, 7)),
        (b"1", OwnerReply(True, 0)),
        (b"0", OwnerReply(False, 0)),
        (b"1 seven", OwnerReply(True, 0)),
        (b"1 -7", OwnerReply(True, 0)),
        (b"1 " + b"9" * 5000, OwnerReply(True, 0)),
        (b"", OwnerReply(False, 0)),
        (b"\xff\xfe 7", OwnerReply(False, 7)),
    ],
)
async def test_reply_that_is_none_of_an_owner_ends_no_follower(
    data: bytes, reply: OwnerReply, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(nats: object, subject: str, payload: bytes, timeout_s: float) -> Any:
        return SimpleNamespace(data=data)

    monkeypatch.setattr(calls, "call_process", call)
    owners = OwnerCalls(cast("Any", None), lambda call: None)
    assert await owners.ask(head("s", "o"), "watch") == reply


async def test_dead_owners_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls: Counter[str] = Counter()

    async def call(nats: object, subject: str, payload: bytes, timeout_s: float) -> Any:
        num_calls[subject] += 1
        raise NoRespondersError

    monkeypatch.setattr(calls, "call_process", call)
    monkeypatch.setattr(calls, "_AGAIN_S", 0.0)
    monkeypatch.setattr(calls, "_MAX_DEAD", 2)
    owners = OwnerCalls(cast("Any", None), lambda call: None)
    for owner in ("a", "b", "a", "c", "b"):
        assert await owners.is_dead(owner)
    # The latest two are known; the oldest is searched again.
    assert set(num_calls.values()) == {calls.NUM_UNHEARD}
    assert await owners.is_dead("a")
    assert num_calls[calls.owner_subject("a")] == 2 * calls.NUM_UNHEARD
