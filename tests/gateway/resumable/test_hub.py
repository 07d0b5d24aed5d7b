"""What a gateway does with streams that other gateways generate, or have generated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from gateway.api.endpoint import IdempotencyKey
from gateway.api.generation_starter import Membership
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from gateway.resumable import hub as hub_module
from gateway.resumable.calls import OwnerCall, OwnerReply
from gateway.resumable.hub import CLAIM_S, StreamHub
from gateway.resumable.live import LiveStream
from gateway.resumable.log import Stored
from gateway.resumable.owner import StreamLimits, StreamOwner
from gateway.resumable.record import KeyRecord, StreamHead, encode_requests
from shared.messages import Request
from shared.server_clock import ServerClock
from tests.gateway.resumable import test_writer
from tests.gateway.resumable.test_writer import head_and_generation
from tests.waiting import until

KEY = IdempotencyKey("key", "body")


class Log(test_writer.Log):
    """One stream, of whose head another gateway has the last word."""

    def __init__(self, head: StreamHead) -> None:
        super().__init__()
        self.head = head
        self.deleted: list[str] = []
        self.revoked: list[str] = []

    def write_at_end_of_turn(self) -> None:
        pass

    async def requests(self, head: StreamHead) -> list[bytes]:
        return encode_requests([Request(id="s-0", model="m", text="x")], 1)

    async def replace(self, head: StreamHead, seq: int) -> int | None:
        return None

    async def delete(self, head: StreamHead) -> None:
        self.deleted.append(head.id)

    async def revoke(self, writer: str) -> None:
        self.revoked.append(writer)


class HeadLog(Log):
    """The same as the hub reads it; a key stands for the stream by message 7."""

    async def find_key(self, tenant: str, digest: str) -> tuple[KeyRecord, int]:
        return KeyRecord("s", KEY.request_digest, 0.0), 7

    async def find(self, tenant: str, stream_id: str) -> Stored | None:  # type: ignore[override]
        return Stored(self.head, 1)


def dispatcher(clock: object = None) -> Any:
    """A dispatcher that takes no request."""
    fleet = SimpleNamespace(do_gateways_understand=lambda feature: False)
    return SimpleNamespace(fleet=fleet, let_go=lambda _: None, clock=clock)


def hub_of(log: Log, starter: object = None, clock: object = None) -> StreamHub:
    nats = SimpleNamespace(jetstream=lambda **_: None, new_inbox=str)
    hub = StreamHub(cast("Any", nats), dispatcher(clock), cast("Any", starter), GatewayMetrics(), StreamLimits())
    hub._log = cast("Any", log)
    return hub


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize(
    ("ended", "is_known", "is_deleted", "is_revoked"),
    [
        (1.0, None, True, False),
        # A follower reads how its owner ends it, who deletes it then.
        (None, True, "unless followed", False),
        (None, False, True, True),
        (None, None, True, True),
    ],
)
async def test_stream_that_another_gateway_generates_is_stopped_and_forgotten(
    ended: float | None, is_known: bool | None, is_deleted: bool | str, is_revoked: bool, is_followed: bool
) -> None:
    head, generation = head_and_generation()
    log = HeadLog(msgspec.structs.replace(head, ended=ended))
    hub = hub_of(log)

    async def ask(head: StreamHead, action: str) -> OwnerReply | None:
        assert action == "stop"
        return None if is_known is None else OwnerReply(is_known, 0)

    hub._calls = cast("Any", SimpleNamespace(ask=ask))
    if is_followed:
        hub._streams["t", "s"] = LiveStream(head, generation, 0.0)
    await hub.stop(head)
    assert all(stream.is_deleted for stream in hub._streams.values()), "its follower tells readers that it was stopped"
    assert bool(log.deleted) == (not is_followed if is_deleted == "unless followed" else is_deleted)
    assert log.revoked == (["w"] if is_revoked else [])


async def test_stream_that_has_become_too_large_here_cannot_be_read_again() -> None:
    head, generation = head_and_generation()
    hub = hub_of(HeadLog(head))
    stream = hub._streams["t", "s"] = LiveStream(head, generation, 0.0)
    assert hub.open(Stored(head, 1)) is stream
    stream.is_cut = True
    with pytest.raises(ApiError, match="it is too large") as raised:
        hub.open(Stored(head, 1))
    assert raised.value.status == 410


async def test_stream_that_could_not_be_stopped_is_not_told_to_be_deleted() -> None:
    class BrokenLog(HeadLog):
        async def delete(self, head: StreamHead) -> None:
            raise ConnectionError

    head, generation = head_and_generation()
    hub = hub_of(BrokenLog(msgspec.structs.replace(head, ended=1.0)))
    stream = hub._streams["t", "s"] = LiveStream(head, generation, 0.0)
    with pytest.raises(ApiError) as raised:
        await hub.stop(head)
    assert raised.value.status == 503
    assert not stream.is_deleted


@pytest.mark.parametrize(
    ("begun_with", "is_shown"),
    [
        ({"key_digest": "key", "body_digest": "body"}, True),
        ({"key_digest": "key"}, True),
        ({"key_digest": "key", "body_digest": "of an earlier attempt"}, False),
        ({"key_digest": "of another request with this x-request-id", "body_digest": "body"}, False),
        ({}, False),
    ],
)
async def test_key_stands_for_no_stream_that_was_begun_with_another_key_or_body(
    begun_with: dict[str, str], is_shown: bool
) -> None:
    head, _ = head_and_generation()
    clock = SimpleNamespace(now=lambda: CLAIM_S + 60.0)
    hub = hub_of(HeadLog(msgspec.structs.replace(head, **begun_with)), clock=clock)
    shown, seq = await hub._find_key("t", KEY)
    assert (shown is not None and shown.head.id, seq) == (is_shown and "s", 7)


class SilentLog(Log):
    """Takes claims, and does not say that it has stored a head."""

    def __init__(self) -> None:
        super().__init__(head_and_generation()[0])
        self.released: list[tuple[str, int]] = []
        self.withdrawn: list[str] = []

    async def find_key(self, tenant: str, digest: str) -> None:
        return None

    async def claim_key(self, tenant: str, digest: str, record: KeyRecord, seq: int) -> int:
        return 7

    async def create(self, head: StreamHead, requests: list[bytes], *, is_unused: bool) -> int:
        assert not is_unused
        assert (head.key_digest, head.body_digest, head.key_seq) == ("key", "body", 7)
        await asyncio.Event().wait()
        return 8

    async def withdraw(self, head: StreamHead) -> bool:
        """Find a head when it is looked for the third time; NATS is away at first."""
        self.withdrawn.append(head.id)
        if len(self.withdrawn) == 1:
            raise ConnectionError
        return len(self.withdrawn) == 3

    async def release_key(self, tenant: str, digest: str, seq: int) -> None:
        self.released.append((digest, seq))


def begin_stream(
    log: Log, window: Mock, answer: object = None
) -> tuple[StreamHub, Callable[[IdempotencyKey | None], Awaitable[Membership]]]:
    """Return a hub, and what begins the stream `s` there."""
    head, generation = head_and_generation()

    async def checked(generation: Generation, *_: object) -> Generation:
        return generation

    async def dispatch(*_: object) -> tuple[None, Mock]:
        return None, window

    starter = SimpleNamespace(checked=checked, dispatch=dispatch, requests=lambda *_: [Request(id="s-0", model="m")])
    hub = hub_of(log, starter, clock=ServerClock())
    hub._owner._log = cast("Any", log)
    caller = SimpleNamespace(request_id="s", tenant="t", key_id="k")
    asked = SimpleNamespace(caller=caller, answer=answer, generation=generation, load=None)
    exchange = SimpleNamespace(head=SimpleNamespace(headers=[(b"x-request-id", b"s")]))
    stamped = SimpleNamespace(stamp=head.stamp, fingerprint=None, head=SimpleNamespace(started=0.0), exchange=exchange)

    def begin(key: IdempotencyKey | None) -> Awaitable[Membership]:
        return hub.start_logged("completion", cast("Any", asked), cast("Any", stamped), cast("Any", None), key)

    return hub, begin


async def test_stream_that_begins_here_is_known_to_later_readers_and_to_other_gateways() -> None:
    class StoringLog(Log):
        async def create(self, head: StreamHead, requests: list[bytes], *, is_unused: bool) -> int:
            self.head = head
            return 8

        async def find(self, tenant: str, stream_id: str) -> None:  # type: ignore[override]
            raise AssertionError("a stream of this process needs no reading")

    log = StoringLog(head_and_generation()[0])
    hub, begin = begin_stream(log, Mock(flights=[]), Mock(done=asyncio.Future(), is_paused=False))
    await begin(None)
    found = await hub.find("t", "s")
    assert found == (log.head, 8)
    stream = hub.open(found)
    assert stream.is_owned
    assert hub._answer_call(OwnerCall("watch", "t", "s")) == 0
    assert stream.is_followed
    assert hub._answer_call(OwnerCall("stop", "t", "s")) == 0
    assert stream.is_deleted
    await hub._owner.close()


async def test_generation_ends_whose_head_comes_too_late_for_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "CLAIM_S", 0.05)
    monkeypatch.setattr(hub_module, "_WITHDRAW_EVERY_S", 0.0)
    log, window = SilentLog(), Mock(flights=[])
    hub, begin = begin_stream(log, window)
    with pytest.raises(ApiError) as raised:
        await begin(KEY)
    assert raised.value.status == 503
    await hub._tasks.wait()
    # A repeated request starts a new generation; these tokens have no reader.
    assert log.released == [("key", 7)]
    window.cancel.assert_called_once()
    # Its client was told 503: a head that is stored late must not be listed as running.
    assert log.withdrawn == ["s"] * 3


async def test_stream_that_another_gateway_took_over_first_is_left_to_it() -> None:
    head, generation = head_and_generation()
    log, stream = Log(head), LiveStream(head, generation, 0.0)
    log.answers.put_nowait(5)

    async def revoked() -> None:
        raise AssertionError

    owner = StreamOwner(cast("Any", log), dispatcher(), GatewayMetrics(), StreamLimits(), lambda stream: None, revoked)
    assert not await owner.take_over(stream)
    assert (stream.head, stream.is_owned, stream.ended.done()) == (head, False, False)
    await until(lambda: not owner.writer.owned)
    await owner.close()
