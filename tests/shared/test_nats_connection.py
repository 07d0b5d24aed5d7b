import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest
import uvloop
from nats.errors import Error as NatsError

from shared import nats_connection
from shared.errors import DependencyError
from shared.nats_connection import ConnectionErrors, Role, WrongRoleError, connect, failure_message
from tests.ops.nats.secured import PASSWORDS, secured_server
from tests.servers import NatsServer
from tests.waiting import until


async def test_connection_uses_the_inbox_prefix_of_its_role(nats_url: str) -> None:
    client = await connect(nats_url, role="worker", name="w")
    assert client.new_inbox().startswith("_INBOX_worker.")
    await client.close()


def test_connection_that_is_lost_is_closed_with_what_waits_for_it(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()

    async def close_while_away() -> None:
        client = await connect(server.url, role="worker", name="w")
        await client.subscribe("a")
        server.kill()
        while client.is_connected:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        await client.publish("a", b"x")
        await client.close()
        assert client.is_closed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(close_while_away())


async def test_missing_server_raises_naming_the_place() -> None:
    with pytest.raises(
        DependencyError, match=r"127\.0\.0\.1:1 did not answer .* \(Connection refused\).*HEADRACE_NATS_URL"
    ):
        await connect("nats://127.0.0.1:1", role="worker", name="w", timeout_s=0.3)


@pytest.mark.parametrize(
    ("code", "remedy"), [(9, "machine's clock"), (10, "machine's clock"), (18, "HEADRACE_NATS_CA")]
)
def test_certificate_that_is_not_valid_now_is_told_from_one_that_is_never_trusted(code: int, remedy: str) -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_code, error.verify_message = code, "no"
    message = failure_message("tls://u:secret@h:4222", [error], 1.0)
    assert (remedy in message, "secret" in message) == (True, False)


async def test_errors_are_logged_unless_somebody_is_told_of_them(caplog: pytest.LogCaptureFixture) -> None:
    connected: Any = SimpleNamespace(is_connected=True)
    told: list[Exception] = []

    async def tell(error: Exception) -> None:
        told.append(error)

    denied = NatsError('nats: Permissions Violation for Publish to "$JS.API.STREAM.MSG.GET.HR_X"')
    await ConnectionErrors(connected, tell).report(NatsError("slow"))
    log = ConnectionErrors(connected, None)
    await log.report(denied)
    assert (len(told), caplog.text) == (1, "")
    await log.report(NatsError("slow"))
    assert "slow" in caplog.text
    # Why a server refuses is said although something else has failed since.
    assert log.failures[0] is denied


@pytest.mark.parametrize(("patch", "is_enough"), [(12, True), (11, False)])
async def test_oldest_server_that_is_enough_is_enough(patch: int, is_enough: bool) -> None:
    version = SimpleNamespace(major=2, minor=12, patch=patch)
    client: Any = SimpleNamespace(connected_server_version=version, close=AsyncMock())
    with contextlib.nullcontext() if is_enough else pytest.raises(DependencyError, match=r"2\.12\.12 or newer"):
        await nats_connection._check_version(client)
    assert client.close.called is not is_enough


async def test_wrong_password_raises_naming_the_settings(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats("--user", "u", "--pass", "p")
    with pytest.raises(DependencyError, match="HEADRACE_NATS_PASSWORD"):
        await connect(server.url, role="worker", name="w", user="u", password="wrong")
    client = await connect(server.url, role="worker", name="w", user="u", password="p")
    await client.close()


async def test_login_in_the_url_is_read_as_that_of_every_url(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats("--user", "u@home", "--pass", "a/b#c,d%")
    url = server.url.replace("://", "://u%40home:a%2Fb%23c%2Cd%25@")
    client = await connect(url, role="worker", name="w")
    await client.close()


async def test_login_of_another_role_is_refused_and_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with secured_server(tmp_path) as server:
        pairs: list[tuple[Role, Role]] = [
            ("worker", "gateway"), ("gateway", "worker"), ("admin", "batch"), ("batch", "worker")
        ]  # fmt: skip
        for role, login in pairs:
            client = await connect(server.url, role=login, name="w", user=login, password=PASSWORDS[login])
            await client.close()
            with pytest.raises(WrongRoleError, match=f"log in as the user `{role}`"):
                await connect(server.url, role=role, name="w", user=login, password=PASSWORDS[login])
        assert num_connections(server) == 0
    assert caplog.records == []


async def test_connecting_that_is_cancelled_leaves_no_connection(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    server.pause()  # its kernel accepts the connection, but no greeting comes
    connecting = asyncio.create_task(connect(server.url, role="worker", name="w"))
    while not num_connections(server):  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert num_connections(server) == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_connecting_that_is_cancelled_again_and_again_leaves_no_connection(nats_url: str) -> None:
    for num_turns in range(40):
        connecting = asyncio.create_task(connect(nats_url, role="worker", name="w"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        while not connecting.done():
            connecting.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await (await connecting).close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def num_connections(server: NatsServer) -> int:
    connections = psutil.Process().net_connections()
    return sum(c.status == psutil.CONN_ESTABLISHED and c.raddr.port == server.port for c in connections)


async def test_old_server_is_refused(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_connection, "MINIMUM_SERVER_VERSION", (99, 0, 0))
    with pytest.raises(DependencyError, match=r"too old: 99\.0\.0"):
        await connect(nats_url, role="worker", name="w")


async def test_killed_server_is_noticed_and_found_again(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    calls: asyncio.Queue[str] = asyncio.Queue()

    async def lost() -> None:
        calls.put_nowait("lost")

    async def back() -> None:
        calls.put_nowait("back")

    client = await connect(server.url, role="gateway", name="g", on_disconnect=lost, on_reconnect=back)
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(message: Any) -> None:
        received.put_nowait(message.data)

    await client.subscribe("s", cb=receive)
    server.kill()
    assert await asyncio.wait_for(calls.get(), 5) == "lost"
    server.restart()
    assert await asyncio.wait_for(calls.get(), 5) == "back"
    await client.publish("s", b"x")
    assert await asyncio.wait_for(received.get(), 5) == b"x"
    await client.close()


@pytest.mark.slow
async def test_connection_is_tried_again_however_often_it_fails(
    start_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(nats_connection._OPTIONS, "reconnect_time_wait", 0.001)
    server = start_nats()
    num_failures, is_back = 0, asyncio.Event()

    async def count(error: Exception) -> None:
        nonlocal num_failures
        num_failures += 1

    async def back() -> None:
        is_back.set()

    client = await connect(server.url, role="gateway", name="g", on_error=count, on_reconnect=back)
    server.kill()
    async with asyncio.timeout(60):
        # The library's own limit is 60.
        while num_failures < 70:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.restart()
        await is_back.wait()
    await client.close()


async def test_login_that_is_refused_for_a_while_is_tried_again(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats("--user", "u", "--pass", "p")
    refusals, is_back = asyncio.Event(), asyncio.Event()

    async def note(error: Exception) -> None:
        if "authorization" in str(error).lower():
            refusals.set()

    async def back() -> None:
        is_back.set()

    client = await connect(
        server.url, role="gateway", name="g", user="u", password="p", on_error=note, on_reconnect=back
    )
    arguments = server.arguments
    server.kill()
    server.arguments = ("--user", "u", "--pass", "other")
    server.start()
    async with asyncio.timeout(30):
        await refusals.wait()
        server.kill()
        server.arguments = arguments
        server.start()
        await is_back.wait()
    await client.close()


async def test_interrupt_that_the_client_loses_ends_the_wait_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    num_lost = 0

    async def connect_as_wait_for_does(self: object, **options: object) -> None:
        nonlocal num_lost
        while num_lost < 3:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                num_lost += 1
        await asyncio.sleep(30)

    monkeypatch.setattr("shared.nats_connection.NatsClient.connect", connect_as_wait_for_does)
    waiting = asyncio.create_task(connect("nats://127.0.0.1:1", role="batch", name="test"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert num_lost == 3


async def test_connection_that_the_server_closes_for_good_is_told_and_one_that_we_close_is_not(
    start_nats: Callable[..., NatsServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("max_subscriptions: 10\n")
    url, told = start_nats("-c", str(config)).url, AsyncMock()
    ours = await connect(url, role="worker", name="ours", on_close=told)
    await ours.close()
    assert not told.called
    theirs = await connect(url, role="worker", name="theirs", on_close=told)
    for number in range(11):
        await theirs.subscribe(f"a.{number}")
    await until(lambda: told.called)
    assert theirs.is_closed
    assert "closed the connection for good: nats: maximum subscriptions exceeded" in caplog.text.lower()
    await theirs.close()
    assert told.await_count == 1
