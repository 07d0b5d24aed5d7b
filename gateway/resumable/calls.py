"""Calls between gateways about the streams that one of them owns: whether it is there, that a stream is read, its end.

NATS answers at once ("no responders") for an owner that has died. One that is frozen does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from gateway.resumable.record import StreamHead
from shared.background_tasks import BackgroundTasks
from shared.calls import call_process
from shared.direct_client import DirectClient
from shared.nats_connection import SEND_ERRORS, unsubscribe
from shared.subjects import owner_subject

TIMEOUT_S = 1.0
# Calls until an owner counts as dead: after a restart of NATS it may be there a moment later.
NUM_UNHEARD = 3
NUM_UNANSWERED = 2
_AGAIN_S = 0.1
_MAX_DEAD = 1024
_YES, _NO = b"1", b"0"
_COUNT = re.compile(rb"[0-9]{1,9}")

Action = Literal["watch", "stop"]


class OwnerCall(Struct, frozen=True, array_like=True):
    """Note that a stream is read elsewhere, or end it; `counts` asks for the number of entries in the answer."""

    action: Action
    tenant: str
    stream_id: str
    counts: bool = False


class OwnerReply(NamedTuple):
    """Whether an owner has a stream, and how many of its entries have been shown; 0 from an earlier version."""

    is_known: bool
    num_shown: int


_decode = msgspec.msgpack.Decoder(OwnerCall).decode


class OwnerCalls:
    """Calls owners, and answers for one."""

    def __init__(self, nats: DirectClient, answer: Callable[[OwnerCall], int | None]) -> None:
        """Call over `nats`; `answer` obeys a call, and returns how many entries of an own stream are shown."""
        self._nats = nats
        self._answer = answer
        self._subscription: Subscription | None = None
        # Names of the dead come never again.
        self._dead: dict[str, None] = {}
        self._searches: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()

    async def serve(self, writer: str) -> None:
        """Answer for a writer of this process, and for no earlier one."""
        await self.close()
        self._subscription = await self._nats.subscribe_direct(owner_subject(writer), self._receive)

    async def close(self) -> None:
        """Answer nothing more: others take the streams over."""
        subscription, self._subscription = self._subscription, None
        await unsubscribe(subscription)

    async def ask(self, head: StreamHead, action: Action) -> OwnerReply | None:
        """Call the owner of a stream; return None if it is dead, raise one of `SEND_ERRORS` if NATS is away."""
        payload = msgspec.msgpack.encode(OwnerCall(action, head.tenant, head.id, counts=True))
        num_unanswered = 0
        while head.owner not in self._dead and num_unanswered < NUM_UNANSWERED:
            if (searching := self._searches.get(head.owner)) is not None:
                # Hundreds of streams may ask for one owner.
                await asyncio.shield(searching)
                continue
            try:
                reply = await call_process(self._nats, owner_subject(head.owner), payload, TIMEOUT_S)
            except NoRespondersError:
                if head.owner not in self._searches:
                    self._search(head.owner)
            except NatsTimeoutError:
                if not self._nats.is_connected:
                    raise
                num_unanswered += 1
            else:
                is_known, _, num_shown = reply.data.partition(b" ")
                # Owners reply with numbers; without one, the stream is read from its log.
                return OwnerReply(is_known == _YES, int(num_shown) if _COUNT.fullmatch(num_shown) else 0)
        return None

    async def is_dead(self, owner: str) -> bool:
        """Whether NATS reports no responders for an owner. A frozen owner still counts as alive."""
        if owner not in self._dead:
            await asyncio.shield(self._searches.get(owner) or self._search(owner))
        return owner in self._dead

    def _search(self, owner: str) -> asyncio.Task[None]:
        searching = self._searches[owner] = self._tasks.spawn(self._look_for(owner), f"search for owner {owner}")
        return searching

    async def _look_for(self, owner: str) -> None:
        try:
            await self._find(owner)
        finally:
            # Not in a done callback, which runs a turn later: awaiting an ended task does not let callbacks run.
            del self._searches[owner]

    async def _find(self, owner: str) -> None:
        for number in range(NUM_UNHEARD):
            await asyncio.sleep(_AGAIN_S if number else 0.0)
            try:
                await call_process(self._nats, owner_subject(owner), b"", TIMEOUT_S)
            except NoRespondersError:
                continue
            except SEND_ERRORS:
                return
            return
        while len(self._dead) >= _MAX_DEAD:
            del self._dead[next(iter(self._dead))]
        self._dead[owner] = None

    def _receive(self, message: Msg) -> None:
        answer = _NO
        with contextlib.suppress(msgspec.MsgspecError):
            call = _decode(message.data)
            if (num_shown := self._answer(call)) is not None:
                answer = b"%b %d" % (_YES, num_shown) if call.counts else _YES
        with contextlib.suppress(*SEND_ERRORS):
            self._nats.send(message.reply, answer)
