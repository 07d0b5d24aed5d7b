"""What a gateway does with streams that other gateways generate, or have generated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.metrics import GatewayMetrics
from gateway.resumable.calls import OwnerReply
from gateway.resumable.hub import StreamHub
from gateway.resumable.live import LiveStream
from gateway.resumable.log import Stored
from gateway.resumable.owner import StreamLimits, StreamOwner
from gateway.resumable.record import StreamHead, encode_requests
from shared.messages import Request
from tests.gateway.resumable import test_writer
from tests.gateway.resumable.test_writer import head_and_generation
from tests.waiting import until


class Log(test_writer.Log):
    """One stream, of whose head another gateway has the last word."""

    def __init__(self, head: StreamHead) -> None:
        super().__init__()
        self.head = head
        self.deleted: list[str] = []
        self.revoked: list[str] = []

    async def requests(self, head: StreamHead) -> list[bytes]:
        return encode_requests([Request(id="s-0", model="m", text="x")], 1)

    async def replace(self, head: StreamHead, seq: int) -> int | None:
        return None

    async def delete(self, head: StreamHead) -> None:
        self.deleted.append(head.id)

    async def revoke(self, writer: str) -> None:
        self.revoked.append(writer)


class HeadLog(Log):
    """The same as the hub reads it."""

    async def find(self, tenant: str, stream_id: str) -> Stored | None:  # type: ignore[override]
        return Stored(self.head, 1)


def dispatcher() -> Any:
    """A dispatcher that takes no request."""
    return SimpleNamespace(fleet=SimpleNamespace(do_gateways_understand=lambda feature: False), let_go=lambda _: None)


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
    nats = SimpleNamespace(jetstream=lambda **_: None, new_inbox=str)
    hub = StreamHub(cast("Any", nats), dispatcher(), cast("Any", None), GatewayMetrics(), StreamLimits())

    async def ask(head: StreamHead, action: str) -> OwnerReply | None:
        assert action == "stop"
        return None if is_known is None else OwnerReply(is_known, 0)

    hub._log, hub._calls = cast("Any", log), cast("Any", SimpleNamespace(ask=ask))
    if is_followed:
        hub._streams["t", "s"] = LiveStream(head, generation, 0.0)
    await hub.stop(head)
    assert bool(log.deleted) == (not is_followed if is_deleted == "unless followed" else is_deleted)
    assert log.revoked == (["w"] if is_revoked else [])


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
