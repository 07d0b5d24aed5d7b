"""What is sent to take requests back; NATS is in memory."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from gateway.dispatch.revoker import Revoker
from shared.messages import Cancel


async def test_requests_that_may_be_cancelled_again_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dispatch.revoker.MAX_REMEMBERED", 2)
    sent: list[bytes] = []

    async def publish(subject: str, payload: bytes) -> None:
        sent.append(payload)

    revoker = Revoker(SimpleNamespace(publish=publish), None)  # type: ignore[arg-type]
    for name in "abc":
        revoker.cancel("m", name, 0)
    await revoker.close()
    sent.clear()
    for name in "abc":
        revoker.cancel_again(name)
    await revoker.close()
    assert [msgspec.msgpack.decode(payload, type=Cancel).ids for payload in sent] == [("b", "c")]
