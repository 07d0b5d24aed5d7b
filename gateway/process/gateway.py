"""A gateway process from its settings: connect, assemble the parts, serve until told to stop, drain.

`main` is the entry point. With `processes > 1` it forks children that share the port and only supervises them. A
process accepts connections once it knows the fleet: until then it would refuse requests for models that are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from gateway.admission.auth import KeyStore
from gateway.admission.limits import RateLimiter
from gateway.admission.shared_places import SharedPlaces
from gateway.admission.shedding import Shedder
from gateway.api.entrance import ALWAYS_SERVED
from gateway.api.generation_service import GenerationService
from gateway.api.generation_starter import GenerationStarter
from gateway.api.operator_app import OperatorServices, create_operator_app
from gateway.api.routes import RouteServices
from gateway.api.structured_output import StructuredOutputAdmission
from gateway.api.tokenizer_client import TokenizerClient
from gateway.cache.prompt_cache import PromptCache
from gateway.cache.redis_client import RedisCache
from gateway.config import GatewayConfig
from gateway.dispatch.counting import count_dispatches
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.fleet.arrival import wait_for_fleet
from gateway.http1.asgi import AsgiHandler
from gateway.http1.connection_table import ConnectionLimits
from gateway.http1.server import HttpServer
from gateway.http1.tls import server_tls
from gateway.metrics import GatewayMetrics
from gateway.process.listeners import Listeners, bind_listeners, url_of
from gateway.process.observing import observing
from gateway.process.parent_link import ParentLink, ProcessState
from gateway.process.process_metrics import MetricsBoard
from gateway.process.processes import SLOTS_PER_PROCESS, ProcessGroup
from gateway.process.public_port import public_handler
from gateway.process.resources import affordable_connections, return_freed_memory
from gateway.process.scraping import scrape_registry
from gateway.process.settings_check import check_settings
from gateway.responses.job_queue import JobQueue
from gateway.responses.log import ResponseLog
from gateway.responses.reasoning_seal import ReasoningSeals
from gateway.responses.store import ResponseStore
from shared.audit import audited_drain, nats_login
from shared.direct_client import DirectClient
from shared.errors import HeadraceError
from shared.nats_connection import SEND_ERRORS, connect
from shared.structured_output.checker import GrammarChecker
from shared.task_supervisor import TaskSupervisor
from shared.telemetry import configure_logging

# Requests allocate many small objects that die young: by default the collector is a quarter of their cost.
GC_THRESHOLDS = (50_000, 20, 50)
SEND_MARGIN_S = 5.0

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)


def main(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status.

    Raises:
        HeadraceError: A setting is wrong, or a server we need is missing.
    """
    check_settings(config)
    if config.processes == 1:
        _configure_logging(config)
        with contextlib.closing(bind_listeners(config)) as listeners:
            return _run(config, listeners, 0, None, None)
    configure_logging("info", config.log_format, role="gateway-parent")
    listeners = bind_listeners(config)
    board = MetricsBoard(config.processes * SLOTS_PER_PROCESS)
    _logger.info("supervising", extra={"processes": config.processes, "url": listeners.url})
    run = partial(_run_child, config, listeners, board)
    return ProcessGroup(config.processes, listeners, run, board.clear).serve()


def _run_child(config: GatewayConfig, listeners: Listeners, board: MetricsBoard, slot: int, link: ParentLink) -> int:
    _configure_logging(config, process=str(slot))
    try:
        return _run(config, listeners, slot, link, board)
    except HeadraceError as error:
        _logger.error("cannot serve: %s", error)
        return 1


def _configure_logging(config: GatewayConfig, **fields: str) -> None:
    configure_logging("info", config.log_format, role="gateway", **fields)


def _run(
    config: GatewayConfig, listeners: Listeners, slot: int, link: ParentLink | None, board: MetricsBoard | None
) -> int:
    return_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, listeners, slot, link, board))


async def _serve(
    config: GatewayConfig, listeners: Listeners, slot: int, link: ParentLink | None, board: MetricsBoard | None
) -> int:
    """Serve until told to stop, or until a task has died that the process cannot do without; return the exit status."""
    stop, tasks = asyncio.Event(), TaskSupervisor()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        if link is not None:
            loop.add_reader(link.parent_pipe, stop.set)
            await stack.enter_async_context(_running(tasks, link.beat_forever(), "beats"))
        parts = await _unless_stopped(stop, _assemble(stack, config, slot, board, tasks))
        if parts is None:
            return 0
        server, operator, cut = parts
        if listeners.operator is not None:
            await operator.start(listeners.operator)
            stack.push_async_callback(operator.close)
        own = listeners.public[0 if link is None else link.socket_index]
        await server.start(own, [other for other in listeners.public if other is not own])
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        _announce(listeners, link)
        await _unless_stopped(stop, tasks.has_failed.wait())
        if link is not None:
            loop.remove_reader(link.parent_pipe)
            link.enter(ProcessState.DRAINING)
        _logger.info("draining", extra={"timeout_s": config.drain_timeout_s})
        user = nats_login(config.nats_user, config.nats_url, config)
        with audited_drain(config.audit_file, "gateway.drain", nats_user=user, timeout_s=config.drain_timeout_s):
            await server.drain(config.drain_timeout_s, cut)
    return 1 if tasks.has_failed.is_set() else 0


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return what `work` returns, or None if this process is told to stop meanwhile: NATS may keep it waiting."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    is_done = working.done()
    for task in (working, stopping):
        task.cancel()
    await asyncio.gather(working, stopping, return_exceptions=True)
    return working.result() if is_done else None


def _announce(listeners: Listeners, link: ParentLink | None) -> None:
    if listeners.operator is not None:
        _logger.info("operator's port", extra={"url": url_of(listeners.operator, listeners.scheme)})
    _logger.info("serving", extra={"url": listeners.url, "pid": os.getpid()})
    if link is not None:
        link.enter(ProcessState.SERVING)


async def _assemble(
    stack: contextlib.AsyncExitStack,
    config: GatewayConfig,
    slot: int,
    board: MetricsBoard | None,
    tasks: TaskSupervisor,
) -> tuple[HttpServer, HttpServer, Callable[[], None]]:
    """Connect, build everything and wait for the fleet.

    Returns:
        The servers of the public and of the operator's port, and what ends the streams that still run.
    """
    metrics = GatewayMetrics()
    keys = KeyStore(
        Path(config.keys_file) if config.keys_file else None, config.api_key, metrics, asks_for_key=config.auth
    )
    redis = await stack.enter_async_context(_redis(config, metrics))
    nats, dispatcher = await stack.enter_async_context(_queue(config, metrics, tasks))
    fleet = dispatcher.fleet
    limiter = RateLimiter(redis, metrics)
    places = None if redis is None else SharedPlaces(redis, time.monotonic)
    shedder = Shedder(config, metrics, places=places)
    cache = PromptCache(redis, config.cache_ttl_s, config.cache_max_value_bytes, config.cache_memory_bytes)
    checker = GrammarChecker()
    stack.push_async_callback(checker.close)
    grammars = StructuredOutputAdmission(checker)
    starter = GenerationStarter(dispatcher, shedder, cache, grammars, metrics, config.default_timeout_s)
    observer = await stack.enter_async_context(observing(config, slot))
    service = GenerationService(config, keys, limiter, shedder, starter, metrics, observer)
    services = RouteServices(
        config=config,
        keys=keys,
        limiter=limiter,
        fleet=fleet,
        queue=dispatcher.nats_watch,
        tokenizer=TokenizerClient(nats),
        metrics=metrics,
    )
    responses = ResponseStore(ResponseLog(nats), JobQueue(nats), ReasoningSeals.read(config.responses_secret))
    stack.push_async_callback(responses.log.close)
    entrance = public_handler(service, services, responses)
    tls = _tls(config)
    public = HttpServer(entrance, _connection_limits(config), ALWAYS_SERVED, metrics.count_connections, tasks, tls)
    registry = await stack.enter_async_context(scrape_registry(metrics, nats, dispatcher, slot, board, tasks))
    operator_app = create_operator_app(
        OperatorServices(config.operator_key, fleet, nats, redis, metrics, registry),
    )
    operator = HttpServer(AsgiHandler(operator_app, config.max_body_bytes), ConnectionLimits(), tasks=tasks, tls=tls)
    await stack.enter_async_context(_running(tasks, service.tick_forever(), "ticks of streams"))
    await stack.enter_async_context(_running(tasks, limiter.state_forever(), "shares of limits"))
    await wait_for_fleet(nats, fleet)
    return public, operator, partial(_cut, dispatcher, responses)


def _tls(config: GatewayConfig) -> ssl.SSLContext | None:
    """Read the certificates.

    Raises:
        ConfigError: One cannot be used.
    """
    return server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)


def _cut(dispatcher: Dispatcher, responses: ResponseStore) -> None:
    """End the streams that still run, and say why."""
    error = ApiError(503, "The gateway is shutting down.", code="shutting_down", retry_after_s=1.0)
    dispatcher.fail_all(error)
    responses.cut_followers(error)


def _connection_limits(config: GatewayConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=affordable_connections(config.max_connections),
        # One key may hold half of them.
        max_body_bytes_in_flight=max(config.max_body_bytes_in_flight, 2 * config.max_body_bytes),
        max_per_address=config.max_connections_per_address,
        head_timeout_s=config.head_timeout_s,
        body_timeout_s=config.body_timeout_s,
        keep_alive_s=config.keep_alive_s,
        # Streams notice slow readers themselves, and tell them; this is for all others.
        send_timeout_s=config.send_timeout_s + SEND_MARGIN_S,
    )


@contextlib.asynccontextmanager
async def _redis(config: GatewayConfig, metrics: GatewayMetrics) -> AsyncIterator[RedisCache | None]:
    if not config.redis_url:
        _logger.warning("no Redis: no response cache, and each gateway limits on its own")
        yield None
        return
    redis = RedisCache(config.redis_url, config.redis_timeout_s, metrics)
    await redis.start()
    try:
        yield redis
    finally:
        await redis.close()


@contextlib.asynccontextmanager
async def _queue(
    config: GatewayConfig, metrics: GatewayMetrics, tasks: TaskSupervisor
) -> AsyncIterator[tuple[DirectClient, Dispatcher]]:
    gateway = f"gw-{secrets.token_hex(6)}"
    dispatchers: list[Dispatcher] = []

    async def lost() -> None:
        metrics.is_nats_connected = False
        metrics.nats_disconnects += 1
        for dispatcher in dispatchers:
            dispatcher.disconnected()

    async def back() -> None:
        metrics.is_nats_connected = True
        for dispatcher in dispatchers:
            await dispatcher.reconnected()

    nats = await connect(
        config.nats_url,
        role="gateway",
        name=gateway,
        user=config.nats_user,
        password=config.nats_password,
        files=config,
        on_disconnect=lost,
        on_reconnect=back,
    )
    try:
        dispatcher = Dispatcher(nats, gateway, tasks=tasks)
        metrics.is_nats_connected = True
        count_dispatches(dispatcher, metrics)
        await dispatcher.start()
        dispatchers.append(dispatcher)
        yield nats, dispatcher
        dispatchers.clear()
        await dispatcher.close()
    finally:
        dispatchers.clear()
        with contextlib.suppress(*SEND_ERRORS):
            await nats.close()


@contextlib.asynccontextmanager
async def _running(tasks: TaskSupervisor, work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    task = tasks.start(work, name)
    try:
        yield
    finally:
        await tasks.stop(task)
