"""The parts of a gateway process: checks before the start, parts made from settings, and the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import ssl
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.routing import Route

from gateway.api.app import ALWAYS_SERVED
from gateway.api.door import Door
from gateway.config import GatewayConfig
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.http1.connection_table import ConnectionLimits
from gateway.metrics import GatewayMetrics
from gateway.openapi.document import OPERATIONS
from gateway.process import assembly
from gateway.process import gateway as gateway_module
from gateway.process.assembly import SEND_MARGIN_S, observing, public_app
from gateway.process.gateway import main
from gateway.process.processes import ParentLink
from gateway.process.settings_check import check_settings
from gateway.usage.routes import UsageRoutes
from shared.errors import ConfigError, DependencyError
from shared.task_supervisor import TaskSupervisor
from shared.tracing import Tracing
from tests.gateway.wire_worker import until
from tests.servers import NatsServer


class Reached(Exception):
    """The settings were found to be right."""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("settings", "variable"),
    [
        ({"operator_port": 0}, "HEADRACE_OPERATOR_KEY"),
        ({"tls_key_file": "key.pem"}, "HEADRACE_TLS_CERT_FILE"),
        ({"auth": False, "host": "192.0.2.1"}, "HEADRACE_AUTH"),
        ({"auth": False}, None),
    ],
)
def test_wrong_settings_are_named_before_a_port_is_bound(
    monkeypatch: pytest.MonkeyPatch, processes: int, settings: dict[str, Any], variable: str | None
) -> None:
    def bind(config: GatewayConfig) -> None:
        raise Reached

    monkeypatch.setattr(gateway_module, "bind_listeners", bind)
    monkeypatch.setattr(gateway_module, "configure_logging", lambda *arguments, **fields: None)
    config = GatewayConfig(port=0, processes=processes, **settings)
    if variable is None:
        with pytest.raises(Reached):
            main(config)
    else:
        with pytest.raises(ConfigError, match=variable):
            main(config)


def test_process_that_cannot_serve_says_why_and_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, listeners, board, link = GatewayConfig(), cast("Any", object()), cast("Any", object()), ParentLink(0, 0, 0)
    logging_fields: list[dict[str, str]] = []
    ran: list[tuple[object, ...]] = []

    def run(*arguments: object) -> int:
        ran.append(arguments)
        if len(ran) > 1:
            raise DependencyError("NATS is not there")
        return 7

    def configure(*arguments: str, **fields: str) -> None:
        logging_fields.append(fields)

    monkeypatch.setattr(gateway_module, "configure_logging", configure)
    monkeypatch.setattr(gateway_module, "_run", run)
    assert gateway_module._run_child(config, listeners, board, 3, link) == 7
    assert gateway_module._run_child(config, listeners, board, 3, link) == 1
    assert ran == [(config, listeners, 3, link, board)] * 2
    assert logging_fields == [{"role": "gateway", "process": "3"}] * 2
    assert "cannot serve: NATS is not there" in caplog.text


def test_limits_of_connections_are_those_of_the_settings() -> None:
    config = GatewayConfig(
        max_connections=11,
        max_body_bytes=5 << 20,
        max_body_bytes_in_flight=11 << 20,
        max_connections_per_address=3,
        head_timeout_s=4.0,
        body_timeout_s=5.0,
        keep_alive_s=6.0,
        send_timeout_s=7.0,
    )
    assert assembly._connection_limits(config) == ConnectionLimits(
        max_connections=11,
        max_body_bytes_in_flight=11 << 20,
        max_per_address=3,
        head_timeout_s=4.0,
        body_timeout_s=5.0,
        keep_alive_s=6.0,
        send_timeout_s=7.0 + SEND_MARGIN_S,
    )
    # A key may hold half of the bytes, and so at least one body.
    larger = GatewayConfig(max_body_bytes=5 << 20, max_body_bytes_in_flight=(10 << 20) - 1)
    assert assembly._connection_limits(larger).max_body_bytes_in_flight == 10 << 20


def test_streams_that_are_cut_and_those_who_follow_responses_are_told_to_return() -> None:
    told: list[tuple[str, ApiError]] = []
    dispatcher = SimpleNamespace(fail_all=lambda error: told.append(("streams", error)))
    responses = SimpleNamespace(cut_followers=lambda error: told.append(("followers", error)))
    streams = SimpleNamespace(hand_over=lambda error: told.append(("resumable", error)))
    assembly._cut(cast("Any", dispatcher), cast("Any", responses), cast("Any", streams))
    # Those that go on elsewhere first: their requests must not fail.
    assert [who for who, _ in told] == ["resumable", "streams", "followers"]
    for _, error in told:
        assert (error.status, error.code, error.retry_after_s) == (503, "shutting_down", 1.0)


async def test_redis_is_connected_until_the_process_ends_and_may_be_left_out(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = GatewayMetrics()
    async with assembly._redis(GatewayConfig(), metrics) as redis:
        assert redis is None
    assert "no Redis" in caplog.text
    async with assembly._redis(GatewayConfig(redis_url=redis_url, redis_timeout_s=2.0), metrics) as redis:
        assert redis is not None
        assert redis.is_available
        assert await redis.set("assembly", b"x", 1.0)
    assert not redis.is_available
    assert metrics.redis_failures == 0


async def test_dispatcher_and_metrics_follow_the_connection_to_nats(
    monkeypatch: pytest.MonkeyPatch, start_nats: Callable[..., NatsServer]
) -> None:
    server, metrics, tasks = start_nats(), GatewayMetrics(), TaskSupervisor()
    told: list[str] = []
    disconnected, reconnected = Dispatcher.disconnected, Dispatcher.reconnected

    def note_loss(dispatcher: Dispatcher) -> None:
        told.append("lost")
        disconnected(dispatcher)

    async def note_return(dispatcher: Dispatcher) -> None:
        told.append("back")
        await reconnected(dispatcher)

    monkeypatch.setattr(Dispatcher, "disconnected", note_loss)
    monkeypatch.setattr(Dispatcher, "reconnected", note_return)
    async with assembly._queue(GatewayConfig(nats_url=server.url), metrics, tasks) as (nats, dispatcher):
        assert (metrics.is_nats_connected, metrics.nats_disconnects) == (True, 0)
        assert dispatcher.reply.count("gw-") == 1
        server.kill()
        await until(lambda: not metrics.is_nats_connected)
        assert (told, metrics.nats_disconnects) == (["lost"], 1)
        server.start()
        await until(lambda: metrics.is_nats_connected)
        await until(lambda: told == ["lost", "back"])
    assert nats.is_closed
    assert told == ["lost", "back"]
    assert not tasks.has_failed.is_set()
    assert not tasks._tasks


async def test_login_and_files_of_the_settings_are_those_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    async def note(url: str, **options: Any) -> None:
        asked.append((url, options))
        raise Reached

    monkeypatch.setattr(assembly, "connect", note)
    config, tasks = GatewayConfig(nats_url="nats://n", nats_user="u", nats_password="p"), TaskSupervisor()
    for _ in range(2):
        with pytest.raises(Reached):
            async with assembly._queue(config, GatewayMetrics(), tasks):
                pass
    (url, options), (_, others) = asked
    assert url == "nats://n"
    given = {name: options[name] for name in ("role", "user", "password", "files")}
    assert given == {"role": "gateway", "user": "u", "password": "p", "files": config}
    # No two processes share a name.
    assert options["name"] != others["name"]
    assert len(options["name"]) == len("gw-") + 12
    # A connection that is closed for good ends the process.
    assert not tasks.has_failed.is_set()
    await options["on_close"]()
    assert tasks.has_failed.is_set()


async def test_task_of_the_process_runs_until_its_block_ends() -> None:
    tasks = TaskSupervisor()
    async with assembly.running(tasks, asyncio.sleep(60), "sleeps"):
        (task,) = tasks._tasks
        assert (task.get_name(), task.done()) == ("sleeps", False)
    assert task.cancelled()
    assert not tasks.has_failed.is_set()
    with contextlib.suppress(RuntimeError):
        async with assembly.running(tasks, asyncio.sleep(60), "sleeps"):
            (task,) = tasks._tasks
            raise RuntimeError
    assert task.cancelled()


async def test_parts_of_a_process_are_made_of_its_settings_and_run_until_it_ends(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for: list[object] = []

    async def wait(nats: object, fleet: object) -> None:
        waited_for.append(fleet)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    monkeypatch.setattr(assembly, "server_tls", lambda *files: context)
    monkeypatch.setattr(assembly, "wait_for_fleet", wait)
    config, tasks = GatewayConfig(nats_url=nats_url, api_key="sk", head_timeout_s=4.0), TaskSupervisor()
    async with contextlib.AsyncExitStack() as stack:
        parts = await assembly.assemble(stack, config, 0, None, tasks)
        public, operator = parts.public, parts.operator
        operator_limits = ConnectionLimits(max_connections=32)
        for server, limits in ((public, assembly._connection_limits(config)), (operator, operator_limits)):
            assert server._acceptor._handshake == {"ssl": context, "ssl_handshake_timeout": limits.head_timeout_s}
            assert server.table.limits == limits
            assert server._tasks is tasks
        assert public._runner._exempt_paths == ALWAYS_SERVED
        assert operator._runner._exempt_paths == frozenset()
        assert len(waited_for) == 1
        names = {task.get_name() for task in tasks._tasks}
        assert {"ticks of streams", "shares of limits", "watch of streams", "heartbeats"} <= names
        parts.cut()
    assert not tasks._tasks
    assert not tasks.has_failed.is_set()


class Provider:
    """Counts calls to flush."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def force_flush(self, timeout_ms: int) -> None:
        self.calls.append("flush")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


async def test_traces_are_made_in_the_name_of_the_process_and_sent_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider()
    tracing = Tracing(cast("Any", provider), cast("Any", None))
    asked: list[tuple[object, ...]] = []

    def make(*arguments: object) -> Tracing:
        asked.append(arguments)
        return tracing

    monkeypatch.setattr(assembly, "make_tracing", make)
    config = GatewayConfig(otlp_endpoint="http://collector:4318", trace_ratio=0.25, request_log_per_s=3.0)
    async with observing(config, 7) as observer:
        assert observer._tracing is tracing
        assert not observer._logs_prompts
        assert provider.calls == []
    assert provider.calls == ["flush", "shutdown"]
    ((endpoint, ratio, role, instance),) = asked
    assert (endpoint, ratio, role) == ("http://collector:4318", 0.25, "gateway")
    assert str(instance).endswith(f"-{os.getpid()}-7")


async def test_endpoint_that_cannot_be_used_is_named_before_anything_is_served() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_OTLP_ENDPOINT"):
        async with observing(GatewayConfig(otlp_endpoint="collector"), 0):
            pass


NOTHING = cast("Any", None)


def made(service: Any = None, responses: Any = None, **settings: Any) -> Door:
    config = GatewayConfig(**settings)
    services = cast("Any", SimpleNamespace(bodies=None, config=config, metrics=None, keys=object(), limiter=None))
    usage = UsageRoutes(services, NOTHING, None).routes()
    return public_app(service, services, responses, NOTHING, NOTHING, more=usage)


def routes(app: Door) -> list[Route]:
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_route_is_described() -> None:
    paths = {re.sub(r":path\}", "}", route.path) for route in routes(made())}
    assert paths - {"/openapi.json"} == {operation.path for operation in OPERATIONS}


def test_every_route_states_who_may_call_it_and_only_these_are_for_everyone() -> None:
    table = routes(made())
    assert len(table) == len(made().routes)
    assert {route.name.partition(":")[0] for route in table} == {"everyone", "key"}
    open_paths = {route.path for route in table if route.name.startswith("everyone:")}
    assert open_paths == {"/health/live", "/health/ready", "/health", "/ping", "/version", "/openapi.json"}


CONFIG = GatewayConfig(
    host="127.0.0.1", port=8000, operator_host="127.0.0.2", operator_port=8001, operator_key="k" * 16, api_key="sk-1"
)


def test_settings_with_which_a_gateway_can_serve_pass() -> None:
    check_settings(CONFIG)


@pytest.mark.parametrize(
    ("host", "operator_host"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "::")],
)
def test_one_port_of_one_host_for_both_is_refused(host: str, operator_host: str) -> None:
    config = dataclasses.replace(CONFIG, host=host, operator_host=operator_host, operator_port=8000)
    with pytest.raises(ConfigError, match=r"HEADRACE_OPERATOR_PORT.* 8000 is HEADRACE_PORT too"):
        check_settings(config)


@pytest.mark.parametrize(
    "ports",
    # Two addresses of one machine; and two free ports that the system chooses.
    [{"port": 8000, "operator_port": 8000}, {"port": 0, "operator_port": 0, "operator_host": "127.0.0.1"}],
)
def test_ports_that_both_can_have_pass(ports: dict[str, object]) -> None:
    check_settings(dataclasses.replace(CONFIG, **ports))  # type: ignore[arg-type]
