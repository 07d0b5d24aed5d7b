"""Orders of gateways for adapters: each is answered, whatever is wrong with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from gpu_worker.adapters.config import AdapterError
from gpu_worker.start.worker_adapters import AdapterOrders
from shared.adapter_calls import AdapterOrder, AdapterReply
from shared.adapter_store import AdapterStoreError

ORDER = msgspec.msgpack.encode(AdapterOrder("a", "1" * 64))


@pytest.mark.parametrize(
    ("data", "outcome", "error", "is_fault"),
    [
        (ORDER, None, "", False),
        (ORDER, AdapterError("the rank is too high"), "the rank is too high", False),
        (ORDER, AdapterStoreError("the store is away"), "the store is away", True),
        (b"\xc1", None, "the order cannot be read: ", False),
    ],
)
async def test_order_is_answered_with_what_came_of_it(
    data: bytes, outcome: Exception | None, error: str, is_fault: bool
) -> None:
    nats, requests = AsyncMock(), Mock(check=AsyncMock(side_effect=outcome))
    message: Any = SimpleNamespace(data=data, reply="reply")
    await AdapterOrders(nats, "w", requests, None, Mock())._answer(message)
    (subject, sent), _ = nats.publish.call_args
    reply = msgspec.msgpack.decode(sent, type=AdapterReply)
    assert (subject, reply.is_fault) == ("reply", is_fault)
    assert (reply.error or "").startswith(error)
    assert bool(reply.error) == bool(error)


async def test_worker_without_places_refuses_orders() -> None:
    nats = AsyncMock()
    message: Any = SimpleNamespace(data=ORDER, reply="reply")
    await AdapterOrders(nats, "w", None, None, Mock())._answer(message)
    reply = msgspec.msgpack.decode(nats.publish.call_args[0][1], type=AdapterReply)
    assert "HEADRACE_MAX_LORAS" in (reply.error or "")
