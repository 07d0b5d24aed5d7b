"""Timelines and counts of all gateway processes: each answers for itself when another one asks.

A process that does not answer within a second is left out; so is one of an earlier version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from gateway.dispatch.timelines import TimelineKeeper, sort_key
from shared.calls import call_process
from shared.direct_client import DirectClient
from shared.messages import UNDECODABLE, encode
from shared.subjects import timeline_subject
from shared.timeline import GatewayCounts, Order, Summary, Timeline, TimelineCall, TimelineReply

TIMEOUT_S = 1.0


class TimelineExchange:
    """Asks and answers."""

    def __init__(
        self,
        nats: DirectClient,
        keeper: TimelineKeeper,
        others: Callable[[], Collection[str]],
        counts: Callable[[], GatewayCounts],
    ) -> None:
        """Ask `others` over `nats`; answer with the timelines of `keeper`, and with `counts`."""
        self._nats = nats
        self._keeper = keeper
        self._others = others
        self._counts = counts
        self._decode = msgspec.msgpack.Decoder(TimelineCall).decode

    async def start(self) -> None:
        """Begin to answer."""
        await self._nats.subscribe(timeline_subject(self._keeper.gateway), cb=self._receive)

    async def find(self, request_id: str) -> list[Timeline]:
        """Return the requests of an id, the latest first."""
        replies = await self._ask(TimelineCall(asked="find", id=request_id))
        return sorted((each for reply in replies for each in reply.found), key=lambda each: each.began, reverse=True)

    async def summaries(self, order: Order, limit: int) -> list[Summary]:
        """Return the first requests of all processes, by an order."""
        replies = await self._ask(TimelineCall(asked="list", order=order, limit=limit))
        listed = [each for reply in replies for each in reply.listed]
        return sorted(listed, key=sort_key(order), reverse=True)[:limit]

    async def counts(self) -> list[GatewayCounts]:
        """Return the counts of all processes, by name."""
        replies = await self._ask(TimelineCall(asked="counts"))
        counts = [reply.counts for reply in replies if reply.counts is not None]
        return sorted(counts, key=lambda each: each.gateway)

    async def _ask(self, call: TimelineCall) -> list[TimelineReply]:
        payload, others = encode(call), self._others()
        replies = await asyncio.gather(*(self._ask_one(name, payload) for name in others))
        return [self._answer(call), *(reply for reply in replies if reply is not None)]

    async def _ask_one(self, gateway: str, payload: bytes) -> TimelineReply | None:
        try:
            reply = await call_process(self._nats, timeline_subject(gateway), payload, TIMEOUT_S)
            return msgspec.msgpack.decode(reply.data, type=TimelineReply)
        except (NatsError, OSError, TimeoutError, *UNDECODABLE):
            return None

    def _answer(self, call: TimelineCall) -> TimelineReply:
        if call.asked == "find":
            return TimelineReply(found=self._keeper.find(call.id))
        if call.asked == "list":
            return TimelineReply(listed=self._keeper.summaries(call.order, call.limit))
        return TimelineReply(counts=self._counts())

    async def _receive(self, message: Msg) -> None:
        try:
            call = self._decode(message.data)
        except UNDECODABLE:
            return
        await message.respond(encode(self._answer(call)))
