"""Operators' orders to this worker: drain, cordon, take on a role. The reply is b"", or the error message."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from nats.aio.msg import Msg

from gpu_worker.consumer.handover import KvHandover
from shared.direct_client import DirectClient
from shared.nats_connection import SEND_ERRORS, inbox_prefix
from shared.subjects import drain_subject

_ADMIN_INBOX = f"{inbox_prefix('admin')}."
_ROLE = b"role "
_NO_ROLE = "it was started without --role, so it neither gives KV to other workers nor fetches theirs"


@dataclass(eq=False)
class OperatorOrders:
    """Hears orders from `start` on. An unknown one, and one that is not of an administrator, has no answer.

    Gateways hear of a change by `send_heartbeat` before the order is answered: an operator's next request meets it.
    """

    _nats: DirectClient
    _worker: str
    _orders: Mapping[bytes, Callable[[], object]]
    _handover: KvHandover | None
    _send_heartbeat: Callable[[], Awaitable[None]]

    async def start(self) -> None:
        """Listen."""
        await self._nats.subscribe(drain_subject(self._worker), cb=self._receive)

    async def _receive(self, message: Msg) -> None:
        if not message.reply.startswith(_ADMIN_INBOX):
            return
        problem = ""
        if message.data.startswith(_ROLE):
            problem = _NO_ROLE
            if self._handover is not None:
                problem = self._handover.set_role(message.data.removeprefix(_ROLE).decode("utf-8", "replace"))
        elif (order := self._orders.get(message.data)) is not None:
            order()
        else:
            return
        with contextlib.suppress(*SEND_ERRORS):
            await self._send_heartbeat()
            await self._nats.publish(message.reply, problem.encode())
