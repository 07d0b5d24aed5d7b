"""A gateway process from its settings: connect, assemble the parts, serve until told to stop, drain.

`main` is the entry point. With `processes > 1` it forks children that share the port and only supervises them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from nats.aio.client import Client

from gateway.app import create_app, create_operator_app
from gateway.auth import KeyStore
from gateway.completions import Completions
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.entrance import ALWAYS_SERVED, Entrance
from gateway.errors import ApiError
from gateway.fleet_metrics import FleetCollector
from gateway.generator import Generator
from gateway.http1.asgi import AsgiHandler
from gateway.http1.connection_table import ConnectionLimits
from gateway.http1.server import HttpServer
from gateway.limits import RateLimiter
from gateway.metrics import GatewayMetrics, make_registry
from gateway.processes import ProcessGroup, bind
from gateway.prompt_cache import PromptCache
from gateway.redis_client import RedisCache
from gateway.routes import RouteServices
from gateway.shedding import Shedder
from gateway.tokenizer_client import TokenizerClient
from shared.errors import ConfigError, HeadraceError
from shared.nats_connection import SEND_ERRORS, connect
from shared.telemetry import configure_logging

# Requests allocate many small objects that die young: by default the collector is a quarter of their cost.
GC_THRESHOLDS = (50_000, 20, 50)
SEND_MARGIN_S = 5.0

_logger = logging.getLogger(__name__)


def main(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status.

    Raises:
        HeadraceError: A setting is wrong, or a server we need is missing.
    """
    if config.processes == 1:
        _configure_logging()
        return _run(config, 0, None)
    configure_logging("info", role="gateway-parent")
    reserved = _bind_public(config, config.port)
    port = reserved.getsockname()[1]
    _logger.info("supervising", extra={"processes": config.processes, "port": port})
    group = ProcessGroup(config.processes, partial(_run_child, config, port))
    return group.serve()


def _run_child(config: GatewayConfig, port: int, index: int, parent_pipe: int) -> int:
    _configure_logging(process=str(index))
    try:
        return _run(config, index, parent_pipe, port)
    except HeadraceError as error:
        _logger.error("cannot serve: %s", error)
        return 1


def _configure_logging(**fields: str) -> None:
    configure_logging("info", role="gateway", **fields)


def _run(config: GatewayConfig, index: int, parent_pipe: int | None, port: int | None = None) -> int:
    public = _bind_public(config, config.port if port is None else port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, index, public, parent_pipe))
    return 0


def _bind_public(config: GatewayConfig, port: int) -> socket.socket:
    try:
        return bind(config.host, port, is_shared=config.processes > 1)
    except OSError as error:
        raise ConfigError("HEADRACE_PORT", f"{config.host}:{port} cannot be used: {error.strerror}") from None


async def _serve(config: GatewayConfig, index: int, public: socket.socket, parent_pipe: int | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent_pipe is not None:
        loop.add_reader(parent_pipe, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        server, operator, cut = await _assemble(stack, config, index)
        for bound in _bind_operator(config, index):
            await operator.start(bound)
            stack.push_async_callback(operator.close)
        await server.start(public)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        host, port = public.getsockname()[:2]
        _logger.info("serving", extra={"url": f"http://{host}:{port}", "pid": os.getpid()})
        await stop.wait()
        if parent_pipe is not None:
            loop.remove_reader(parent_pipe)
        _logger.info("draining", extra={"timeout_s": config.drain_timeout_s})
        await server.drain(config.drain_timeout_s, cut)


def _bind_operator(config: GatewayConfig, index: int) -> list[socket.socket]:
    if config.metrics_port is None:
        return []
    port = config.metrics_port + index if config.metrics_port else 0
    try:
        bound = bind(config.metrics_host, port, is_shared=False)
    except OSError as error:
        place = f"{config.metrics_host}:{port}"
        raise ConfigError("HEADRACE_METRICS_PORT", f"{place} cannot be used: {error.strerror}") from None
    _logger.info("operator port", extra={"url": "http://{}:{}".format(*bound.getsockname()[:2])})
    return [bound]


async def _assemble(
    stack: contextlib.AsyncExitStack, config: GatewayConfig, index: int
) -> tuple[HttpServer, HttpServer, Callable[[], None]]:
    """Connect and build everything; return the servers of both ports, and what ends the streams that still run."""
    metrics = GatewayMetrics()
    keys = KeyStore(Path(config.keys_file) if config.keys_file else None, config.api_key, metrics)
    redis = await stack.enter_async_context(_redis(config, metrics))
    nats, dispatcher = await stack.enter_async_context(_queue(config, metrics))
    limiter = RateLimiter(redis, metrics)
    shedder = Shedder(config, metrics)
    cache = PromptCache(redis, config.cache_ttl_s, config.cache_max_value_bytes)
    generator = Generator(dispatcher, shedder, cache, metrics, config.default_timeout_s)
    completions = Completions(config, keys, limiter, shedder, generator, metrics)
    registry = make_registry(metrics, index)
    registry.register(FleetCollector(dispatcher.fleet))
    services = RouteServices(
        config=config,
        keys=keys,
        limiter=limiter,
        fleet=dispatcher.fleet,
        queue=nats,
        tokenizer=TokenizerClient(nats),
        redis=redis,
        metrics=metrics,
        registry=registry,
    )
    entrance = Entrance(completions, AsgiHandler(create_app(services), config.max_body_bytes))
    shutting_down = ApiError(503, "The gateway is shutting down.", code="shutting_down", retry_after_s=1.0)
    public = HttpServer(entrance, _connection_limits(config), ALWAYS_SERVED)
    operator = HttpServer(AsgiHandler(create_operator_app(services), config.max_body_bytes), ConnectionLimits())
    for work in (completions.tick_forever(), limiter.state_forever()):
        await stack.enter_async_context(_background(work))
    return public, operator, partial(dispatcher.fail_all, shutting_down)


def _connection_limits(config: GatewayConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=config.max_connections,
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
async def _queue(config: GatewayConfig, metrics: GatewayMetrics) -> AsyncIterator[tuple[Client, Dispatcher]]:
    gateway = f"gw-{secrets.token_hex(6)}"
    dispatchers: list[Dispatcher] = []

    async def lost() -> None:
        for dispatcher in dispatchers:
            dispatcher.disconnected()

    async def back() -> None:
        for dispatcher in dispatchers:
            await dispatcher.reconnected()

    nats = await connect(
        config.nats_url,
        role="gateway",
        name=gateway,
        user=config.nats_user,
        password=config.nats_password,
        on_disconnect=lost,
        on_reconnect=back,
    )
    try:
        dispatcher = Dispatcher(nats, gateway)
        dispatcher.count_moves(lambda reason: metrics.redispatches.update((reason,)))
        dispatcher.on_end = lambda flight, ending: metrics.sequences.update((ending,))
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
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
