"""What the log says of streams whose process lives on while NATS loses its memory."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.metrics import GatewayMetrics
from gateway.resumable.live import LiveStream
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

    def send(self, *place: str | int, payload: bytes) -> None:
        """Drop pieces."""


@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_stream_that_ends_while_its_head_is_written_again_is_not_left_running(ends_first: bool) -> None:
    log = Heads()
    dispatcher = SimpleNamespace(
        fleet=SimpleNamespace(do_gateways_understand=lambda feature: True), clock=SimpleNamespace(now=time.time)
    )
    limits = StreamLimits()
    owner = StreamOwner(
        cast("Any", log), cast("Any", dispatcher), GatewayMetrics(), limits, lambda stream: None, asyncio.Event().wait
    )
    stream = LiveStream(*head_and_generation(), 0.0)
    owner.begin(stream)
    owner.opened(stream, 3)
    owner._lost(stream)

    def end() -> None:
        finish = Finish("stop", Usage(1, 1))
        stream.entries.append((0, Delta("s", 0, 0, (1,), "a", finish), None))
        stream.show(1)

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
