"""What the supervisor hears of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import nats
import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from ops.stack import console
from ops.stack import roll_call as roll_call_module
from ops.stack.plan import NatsAccess
from ops.stack.roll_call import Beat, RollCall
from shared.errors import DependencyError
from shared.messages import encode
from shared.subjects import worker_subject
from tests.gateway.api.test_app import heartbeat
from tests.gateway.wire_worker import until
from tests.servers import NatsServer


@pytest.mark.parametrize(
    ("running", "second_step", "advances"),
    [(0, 5, True), (3, 5, False), (3, 6, True)],
    ids=["idle", "stalled", "works"],
)
async def test_worker_advances_when_its_steps_do_or_it_is_idle(
    nats_url: str, running: int, second_step: int, advances: bool
) -> None:
    roll_call = RollCall(NatsAccess(nats_url, None, None))
    assert not roll_call.is_connected
    await roll_call.open()
    worker = await nats.connect(nats_url)
    pid = 2**22 + 7

    async def beat(step: int, running: int) -> Beat:
        payload = encode(heartbeat("roll-call", step=step, running=running, pid=pid))
        await worker.publish(worker_subject("roll-call", "w"), payload)
        heard: dict[int, Beat] = {}
        await until(lambda: heard.update(roll_call.take_beats()) or pid in heard)
        return heard[pid]

    assert roll_call.is_connected
    assert await beat(5, running) == Beat(5, advances=True)
    assert await beat(second_step, running) == Beat(second_step, advances=advances)
    await worker.close()
    await roll_call.close()
    assert not roll_call.is_connected


async def test_connection_that_the_server_closes_for_good_is_made_anew(
    start_nats: Callable[..., NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.stack.roll_call.RETRY_S", 0.01)
    config = tmp_path / "nats.conf"
    config.write_text("max_subscriptions: 10\njetstream {}\n")
    roll_call = RollCall(NatsAccess(start_nats("-c", str(config)).url, None, None))
    await roll_call.open()
    first = roll_call._client
    assert first is not None
    for number in range(11):
        await first.subscribe(f"a.{number}")
    await until(lambda: first.is_closed and roll_call.is_connected)
    assert roll_call._client is not first
    await roll_call.close()


async def test_connection_that_cannot_be_used_is_closed_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Mock] = []

    async def make(*_: object, **__: object) -> Mock:
        client = Mock(is_closed=False, subscribe=AsyncMock())

        async def end() -> None:
            client.is_closed = True

        client.close = AsyncMock(side_effect=end)
        made.append(client)
        return client

    failures = [DependencyError("JetStream is not up"), NatsTimeoutError(), NatsTimeoutError()]

    async def fail(*_: object) -> None:
        if len(made) <= len(failures):
            raise failures[len(made) - 1]

    monkeypatch.setattr(roll_call_module, "RETRY_S", 0.0)
    monkeypatch.setattr(roll_call_module, "connect", make)
    for step in ("ensure_streams", "reshape_streams", "delete_old_receipts", "delete_old_days"):
        monkeypatch.setattr(roll_call_module, step, AsyncMock(side_effect=fail))
    roll_call = RollCall(NatsAccess("nats://127.0.0.1:1", None, None))
    await roll_call._on_close()
    reopening = roll_call._reopening
    assert reopening is not None
    await asyncio.wait_for(reopening, 20)
    assert [client.is_closed for client in made] == [True, True, True, False]
    made[-1].subscribe.assert_awaited_once()
    # What cannot be listened on is of no use either.
    failures.clear()
    refusing = await make()
    refusing.subscribe.side_effect = NatsTimeoutError
    monkeypatch.setattr(roll_call_module, "connect", AsyncMock(return_value=refusing))
    with pytest.raises(DependencyError, match="cannot be listened to"):
        await roll_call.open()
    assert refusing.is_closed


async def test_server_that_does_not_appear_is_told_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "QUIET_S", 0.05)
    told: list[str] = []
    opening = asyncio.create_task(RollCall(NatsAccess("nats://u:secret@127.0.0.1:1", None, None), told.append).open())
    await until(lambda: told)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert told == ["waiting up to 10 s for NATS at 127.0.0.1:1"]


async def test_server_that_is_still_starting_is_waited_for_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = NatsServer(tmp_path)
    server.start()
    server.kill()
    roll_call = RollCall(NatsAccess(server.url, None, None))
    opening = asyncio.create_task(roll_call.open())
    await asyncio.sleep(0.3)
    assert not opening.done()
    await asyncio.to_thread(server.start)
    await opening
    await roll_call.close()
    server.kill()
    assert caplog.messages == []
