"""A host's connection: what the server closes for good is made anew, and orders are heard again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from nats.errors import ConnectionClosedError

from ops.stack.config import HostSettings
from ops.stack.console import Console
from ops.stack.hosting import host as host_module
from ops.stack.hosting.host import Host
from ops.stack.plan import NatsAccess
from shared.errors import DependencyError
from shared.hosted_models import ModelOrder, ModelReply
from shared.messages import encode
from shared.nats_connection import connect
from shared.subjects import model_order_subject
from tests.servers import NatsServer
from tests.waiting import until


async def test_host_hears_orders_again_after_the_server_has_closed_its_connection_for_good(
    start_nats: Callable[..., NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.stack.hosting.host.RETRY_S", 0.01)
    config = tmp_path / "nats.conf"
    config.write_text("max_subscriptions: 10\n")
    url = start_nats("-c", str(config)).url
    parts = (HostSettings(host_name="h"), NatsAccess(url, None, None), {}, tmp_path, Console())
    host = Host(*parts, hang_timeout_s=10, audit_file=tmp_path / "audit.log")
    await host.start()
    running, first = asyncio.create_task(host.run()), host._nats
    assert first is not None
    for number in range(11):
        await first.subscribe(f"a.{number}")
    await until(lambda: host._nats is not first)
    gateway = await connect(url, role="gateway", name="g")
    order = encode(ModelOrder(action="unload", name="nothere"))
    answer = await gateway.request(model_order_subject("h"), order, timeout=20)
    assert "nothere" in (msgspec.msgpack.decode(answer.data, type=ModelReply).error or "")
    running.cancel()
    await gateway.close()
    await host.stop(1)


async def test_connection_on_which_orders_cannot_be_heard_is_closed_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats = Mock(subscribe=AsyncMock(side_effect=ConnectionClosedError), close=AsyncMock())
    monkeypatch.setattr(host_module, "connect", AsyncMock(return_value=nats))
    parts = (HostSettings(host_name="h"), NatsAccess("nats://127.0.0.1:1", None, None), {}, tmp_path, Console())
    with pytest.raises(DependencyError, match="cannot be listened to"):
        await Host(*parts, hang_timeout_s=10, audit_file=tmp_path / "audit.log").start()
    nats.close.assert_awaited_once()
