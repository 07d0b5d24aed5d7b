"""What the log says of streams whose process lives on while NATS loses its memory."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from gateway.api.sequences import SequenceWindow
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.resumable.live import LiveStream, LoggedSink, fail
from gateway.resumable.owner import StreamLimits, StreamOwner
from gateway.resumable.record import StreamHead
from shared.messages import Delta, Finish, Usage
from tests.gateway.resumable.test_writer import head_and_generation
from tests.waiting import until


class Heads:
    """The heads of a log: one is replaced by who knows its number. New ones are stored when the test lets them."""

    def __init__(self) -> None:
        self.stored: dict[int, StreamHead] = {}
        self.may_create = asyncio.Event()
        self.num_replaced = 0
        self.released: list[tuple[str, str, int]] = []

    async def create(self, head: StreamHead, requests: list[bytes]) -> int:
        await self.may_create.wait()
        self.stored = {7: head}
        return 7

    async def replace(self, head: StreamHead, seq: int) -> int | None:
        self.num_replaced += 1
        if seq not in self.stored:
            return None
        self.stored = {seq + 1: head}
        return seq + 1

    async def release_key(self, tenant: str, digest: str, seq: int) -> None:
        self.released.append((tenant, digest, seq))

    async def delete(self, head: StreamHead) -> None:
        self.stored.clear()

    def send(self, *place: str | int, payload: bytes) -> None:
        """Drop pieces."""


def owner_of(log: Heads) -> StreamOwner:
    dispatcher: Any = SimpleNamespace(
        fleet=SimpleNamespace(do_gateways_understand=lambda feature: True), clock=SimpleNamespace(now=time.time)
    )
    return StreamOwner(
        cast("Any", log), dispatcher, GatewayMetrics(), StreamLimits(), lambda stream: None, asyncio.Event().wait
    )


def deliver_end(stream: LiveStream) -> None:
    """Deliver the only piece of a stream, and show it."""
    LoggedSink(stream, 0, lambda _: None).deliver(Delta("s", 0, 0, (1,), "a", Finish("stop", Usage(1, 1))))
    stream.show(1)


@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_stream_that_ends_while_its_head_is_written_again_is_not_left_running(ends_first: bool) -> None:
    log = Heads()
    owner = owner_of(log)
    stream = LiveStream(*head_and_generation(), 0.0)
    owner.begin(stream)
    owner.opened(stream, 3)
    owner._lost(stream)

    def end() -> None:
        deliver_end(stream)

    if ends_first:
        end()
        await until(lambda: log.num_replaced == 1)
        log.may_create.set()
    else:
        log.may_create.set()
        await until(lambda: 7 in log.stored)
        end()
    await until(lambda: any(head.ended is not None for head in log.stored.values()))
    await owner.close()


async def test_stream_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    log = Heads()
    log.stored = {3: head_and_generation()[0]}
    owner = owner_of(log)
    stream = LiveStream(*head_and_generation(), 0.0)
    owner.begin(stream)
    submit: Any = lambda _, sink: SimpleNamespace(sink=sink)  # noqa: E731
    stream.window = SequenceWindow(submit, lambda _: None, owner.sinks(stream), 1)
    stream.window.begin()
    owner.opened(stream, 3)
    freed = weakref.ref(stream)
    gc.disable()
    try:
        deliver_end(stream)
        await until(lambda: log.num_replaced == 1)
        await owner.close()
        del stream
        assert freed() is None
    finally:
        gc.enable()


async def test_stream_that_is_handed_over_is_neither_written_nor_counted_here_any_more() -> None:
    owner = owner_of(Heads())
    stream = LiveStream(*head_and_generation(), 0.0)
    stream.lease = lease = Mock()
    owner.begin(stream)
    owner.opened(stream, 3)
    owner.hand_over(ApiError(503, "This gateway stops."))
    assert not owner.writer.owned
    assert not stream.is_owned
    assert owner._num_of["t"] == 0
    lease.release.assert_called_once_with(0)
    await owner.close()


@pytest.mark.parametrize(("fails", "released"), [(True, [("t", "key", 5)]), (False, [])])
async def test_key_is_free_after_a_failure_and_stands_for_an_answer(fails: bool, released: list[object]) -> None:
    log = Heads()
    log.stored = {3: head_and_generation()[0]}
    owner = owner_of(log)
    head, generation = head_and_generation()
    stream = LiveStream(msgspec.structs.replace(head, key_digest="key", key_seq=5), generation, 0.0)
    owner.begin(stream)
    owner.opened(stream, 3)
    if fails:
        fail(stream, ApiError(503, "No worker serves it."))
        stream.show(1)
    else:
        deliver_end(stream)
    await until(lambda: log.num_replaced == 1)
    await owner.close()
    assert log.released == released
