"""The parts of a gateway process, from its settings: connections, the fleet, admission, the APIs and its two ports.

`assemble` starts what runs beside the servers, and leaves on the exit stack what ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gateway.admission.auth import KeyStore
from gateway.admission.limits import RateLimiter
from gateway.admission.shared_places import SharedPlaces
from gateway.admission.shedding import Shedder
from gateway.admission.stored_reads import StoredReads
from gateway.anthropic.message import MessagesEndpoint, count_tokens_route
from gateway.api.adapter_orders import adapter_orders
from gateway.api.alias_routes import alias_routes
from gateway.api.app import ALWAYS_SERVED, create_app
from gateway.api.door import Door
from gateway.api.endpoint import ChatEndpoint, CompletionEndpoint, Endpoint
from gateway.api.generation_service import GenerationService
from gateway.api.generation_starter import GenerationStarter
from gateway.api.operator_app import OperatorRoute, OperatorServices, create_operator_app
from gateway.api.output_reading import StructuredOutputAdmission
from gateway.api.request_observer import RequestObserver
from gateway.api.routes import KeyRoute, RouteServices
from gateway.api.tokenizer_client import TokenizerClient
from gateway.batches.endpoint import batch_routes, unserved_routes
from gateway.cache.prompt_cache import PromptCache
from gateway.cache.redis_client import RedisCache
from gateway.config import GatewayConfig
from gateway.console.keys import ConsoleKeys
from gateway.console.routes import ConsoleRoutes, ConsoleServices, with_playground
from gateway.console.views import NowView, own_counts
from gateway.dispatch.dispatcher import DispatchCounts, Dispatcher
from gateway.dispatch.timelines import TimelineKeeper
from gateway.errors import shutting_down
from gateway.fleet.readiness import wait_for_fleet
from gateway.fleet.worker_needs import Models, WorkerNeeds
from gateway.http1.connection import Connection
from gateway.http1.connection_table import ConnectionLimits, ConnectionTable
from gateway.http1.handlers import AsgiHandler
from gateway.http1.server import HttpServer, server_tls
from gateway.media.fetch import AllowedHosts, ImageFetcher
from gateway.media.intake import ImageIntake, ImageLimits
from gateway.metrics import GatewayMetrics
from gateway.openapi.document import OPENAPI_ROUTE
from gateway.pooling.answers import EmbeddingsEndpoint, RerankEndpoint, ScoreEndpoint
from gateway.process.listeners import affordable_connections
from gateway.process.process_metrics import MetricsBoard, drift_watch, scrape_registry
from gateway.responses.endpoint import CompactEndpoint, ResponsesEndpoint, input_tokens_route
from gateway.responses.job_queue import JobQueue
from gateway.responses.log import ResponseLog
from gateway.responses.reasoning_seal import ReasoningSeals
from gateway.responses.store import ResponseStore
from gateway.responses.stored import StoredResponses
from gateway.resumable.hub import StreamHub
from gateway.resumable.owner import StreamLimits
from gateway.resumable.routes import StreamRoutes
from gateway.telemetry.drift_watch import DriftWatch
from gateway.timelines.exchange import TimelineExchange
from gateway.usage.routes import UsageRoutes
from shared.direct_client import DirectClient
from shared.grammar.checker import GrammarChecker
from shared.media_store import MediaStore
from shared.nats_connection import SEND_ERRORS, connect
from shared.request_log import RequestLog
from shared.task_supervisor import TaskSupervisor
from shared.tracing import make_tracing

SEND_MARGIN_S = 5.0
# Those beyond get a refusal. They are among the files that `gateway.process.listeners` keeps free.
OPERATOR_CONNECTIONS = 32

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of a gateway process."""

    public: HttpServer
    operator: HttpServer
    cut: Callable[[], None]


async def assemble(
    stack: contextlib.AsyncExitStack,
    config: GatewayConfig,
    slot: int,
    board: MetricsBoard | None,
    tasks: TaskSupervisor,
) -> GatewayParts:
    """Connect, build everything and wait for the fleet; `HeadraceError` for a wrong setting or a missing server."""
    metrics = GatewayMetrics()
    redis = await stack.enter_async_context(_redis(config, metrics))
    nats, dispatcher = await stack.enter_async_context(_queue(config, metrics, tasks))
    shedder = Shedder(config, metrics, places=None if redis is None else SharedPlaces(redis, time.monotonic))
    cache = PromptCache(redis, config.cache_ttl_s, config.cache_max_value_bytes, config.cache_memory_bytes)
    grammars = _grammars(stack)
    starter = GenerationStarter(dispatcher, shedder, cache, grammars, metrics, config.default_timeout_s)
    observer = await stack.enter_async_context(observing(config, slot, dispatcher.counts.timelines))
    adapters = await adapter_orders(stack, config.adapters, nats, dispatcher, tasks)
    services = _services(config, metrics, redis, nats, dispatcher)
    streams = await _streams(stack, config, nats, dispatcher, starter, metrics)
    service = GenerationService(services, dispatcher, shedder, starter, observer, streams)
    responses = _responses(stack, services, nats, dispatcher)
    batches, more = None, UsageRoutes(services, nats.jetstream(), config.device_hour_cost).routes()
    if config.files is not None:
        batches = await batch_routes(stack, services, grammars, nats, dispatcher, responses.jobs.kept, tasks)
    application = public_app(service, services, responses, streams, observer, batches, more)
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    handler, count = AsgiHandler(application, config.max_body_bytes), partial(count_connections, metrics)
    public = HttpServer(handler, _connection_limits(config), ALWAYS_SERVED, count, tasks, tls)
    needs, drift = _needs(config, dispatcher, shedder), drift_watch(nats, dispatcher)
    registry = await stack.enter_async_context(scrape_registry(nats, dispatcher, needs, drift, slot, board, tasks))
    shown = (metrics, registry, needs, adapters, await _console(stack, services, nats, dispatcher, drift, tasks))
    told = OperatorServices(config.operator_key, dispatcher.fleet, nats, redis, *shown)
    operator_handler = AsgiHandler(with_playground(create_operator_app(told), application), config.max_body_bytes)
    operator = HttpServer(operator_handler, ConnectionLimits(OPERATOR_CONNECTIONS), tasks=tasks, tls=tls)
    await stack.enter_async_context(running(tasks, service.tick_forever(), "ticks of streams"))
    await _count_usage(stack, metrics, nats, tasks)
    await stack.enter_async_context(running(tasks, services.limiter.state_forever(), "shares of limits"))
    await wait_for_fleet(nats, dispatcher.fleet)
    return GatewayParts(public, operator, partial(_cut, dispatcher, responses, streams))


async def _count_usage(
    stack: contextlib.AsyncExitStack, metrics: GatewayMetrics, nats: DirectClient, tasks: TaskSupervisor
) -> None:
    usage, js = metrics.usage, nats.jetstream()
    stack.push_async_callback(usage.flush, js, is_last=True)
    await stack.enter_async_context(running(tasks, usage.flush_forever(js), "usage of tenants"))


async def _console(
    stack: contextlib.AsyncExitStack,
    services: RouteServices,
    nats: DirectClient,
    dispatcher: Dispatcher,
    drift: DriftWatch,
    tasks: TaskSupervisor,
) -> list[OperatorRoute]:
    """Return the routes of the console and of aliases, and start announcing this gateway's state to the others."""
    config, timelines = services.config, dispatcher.counts.timelines
    own = partial(own_counts, dispatcher.name, dispatcher, services.metrics)
    exchange = TimelineExchange(nats, timelines, lambda: dispatcher.fleet.gateways, own)
    await exchange.start()
    now, js, cost = NowView(dispatcher, exchange), nats.jetstream(), config.device_hour_cost
    path = None if config.keys_file is None else Path(config.keys_file)
    key_file = ConsoleKeys(path, config.audit_file, asks_for_key=config.operator_key is not None)
    shown = ConsoleServices(now, exchange, js, services.keys, key_file, drift, cost, shows_prompts=config.log_prompts)
    aliases = await alias_routes(stack, services, nats, dispatcher.name, tasks)
    return [*ConsoleRoutes(shown).routes(), *aliases]


def _images(config: GatewayConfig, nats: DirectClient) -> ImageIntake:
    limits = ImageLimits(config.max_image_bytes, config.max_image_pixels, config.max_images, config.max_request_pixels)
    fetcher = ImageFetcher(AllowedHosts.read(config.image_hosts), config.max_image_bytes)
    store = MediaStore(nats.jetstream(), config.media_tenant_bytes, lambda: nats.stats["reconnects"])
    return ImageIntake(store, limits, fetcher)


def _needs(config: GatewayConfig, dispatcher: Dispatcher, shedder: Shedder) -> WorkerNeeds:
    fleet = dispatcher.fleet
    models = Models(fleet.models, fleet.workers, fleet.load, shedder.outlook)
    return WorkerNeeds(models, config.interactive_ttft_slo_s, config.batch_drain_s)


def _keys(config: GatewayConfig, metrics: GatewayMetrics) -> KeyStore:
    file = Path(config.keys_file) if config.keys_file else None
    return KeyStore(file, config.api_key, metrics, probe_key=config.probe_key, asks_for_key=config.auth)


def _services(
    config: GatewayConfig, metrics: GatewayMetrics, redis: RedisCache | None, nats: DirectClient, dispatcher: Dispatcher
) -> RouteServices:
    limiter = RateLimiter(redis, metrics)
    return RouteServices(
        config=config,
        keys=_keys(config, metrics),
        limiter=limiter,
        reads=StoredReads(limiter),
        fleet=dispatcher.fleet,
        queue=dispatcher.nats_watch,
        tokenizer=TokenizerClient(nats, clock=dispatcher.clock),
        metrics=metrics,
        images=_images(config, nats),
        wake=dispatcher.wake_soon,
    )


def _responses(
    stack: contextlib.AsyncExitStack, services: RouteServices, nats: DirectClient, dispatcher: Dispatcher
) -> ResponseStore:
    log, jobs = ResponseLog(nats, services.bodies), JobQueue(nats, dispatcher.clock)
    stack.push_async_callback(log.close)
    stack.push_async_callback(jobs.kept.shares.close)
    seals = ReasoningSeals.read(services.config.responses_secret)
    return ResponseStore(log, jobs, seals, services.bodies, services.reads)


def _grammars(stack: contextlib.AsyncExitStack) -> StructuredOutputAdmission:
    checker = GrammarChecker()
    stack.push_async_callback(checker.close)
    return StructuredOutputAdmission(checker)


async def _streams(
    stack: contextlib.AsyncExitStack,
    config: GatewayConfig,
    nats: DirectClient,
    dispatcher: Dispatcher,
    starter: GenerationStarter,
    metrics: GatewayMetrics,
) -> StreamHub:
    """Return the hub of resumable streams, which leaves them to other gateways when this one stops."""
    limits = StreamLimits(config.resume_grace_s, config.resume_keep_s, config.resume_stream_bytes)
    streams = StreamHub(nats, dispatcher, starter, metrics, limits)
    await streams.start()
    stack.push_async_callback(streams.close)
    return streams


def _cut(dispatcher: Dispatcher, responses: ResponseStore, streams: StreamHub) -> None:
    error = shutting_down()
    # Before the others: these go on at other gateways.
    streams.hand_over(error)
    dispatcher.fail_all(error)
    responses.cut_followers(error)


def count_connections(metrics: GatewayMetrics, table: ConnectionTable[Connection]) -> None:
    """Take over the counts of the public port's server."""
    metrics.connections = len(table.members)
    metrics.connections_evicted = table.num_evicted
    metrics.connections_limited = table.num_limited


def _connection_limits(config: GatewayConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=affordable_connections(config.max_connections),
        # One key may hold half of them.
        max_body_bytes_in_flight=max(config.max_body_bytes_in_flight, 2 * config.max_body_bytes),
        max_per_address=config.max_connections_per_address,
        head_timeout_s=config.head_timeout_s,
        body_timeout_s=config.body_timeout_s,
        keep_alive_s=config.keep_alive_s,
        # Streams detect slow readers themselves; this covers all other answers.
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
    timelines = TimelineKeeper(gateway, config.keep_requests, metrics.usage, shows_prompts=config.log_prompts)
    counts = DispatchCounts(metrics, timelines)
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
        on_close=partial(_end, tasks),
    )
    try:
        dispatcher = Dispatcher(nats, gateway, tasks=tasks, counts=counts)
        metrics.is_nats_connected = True
        await dispatcher.start()
        dispatchers.append(dispatcher)
        yield nats, dispatcher
        dispatchers.clear()
        await dispatcher.close()
    finally:
        dispatchers.clear()
        with contextlib.suppress(*SEND_ERRORS):
            await nats.close()


async def _end(tasks: TaskSupervisor) -> None:
    tasks.has_failed.set()


@contextlib.asynccontextmanager
async def running(tasks: TaskSupervisor, work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run a task that the process cannot do without, until the block ends."""
    task = tasks.start(work, name)
    try:
        yield
    finally:
        await tasks.stop(task)


_requests = logging.getLogger("gateway.requests")


@contextlib.asynccontextmanager
async def observing(
    config: GatewayConfig, slot: int, timelines: TimelineKeeper | None = None
) -> AsyncIterator[RequestObserver]:
    """Tell of requests until the block ends, and send the rest then; `ConfigError` if traces cannot be made."""
    instance = f"{socket.gethostname()}-{os.getpid()}-{slot}"
    tracing = make_tracing(config.otlp_endpoint, config.trace_ratio, "gateway", instance)
    log = RequestLog(_requests, config.request_log_per_s)
    try:
        yield RequestObserver(log, tracing, logs_prompts=config.log_prompts, timelines=timelines)
    finally:
        log.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def public_app(
    service: GenerationService,
    services: RouteServices,
    responses: ResponseStore,
    streams: StreamHub,
    observer: RequestObserver | None,
    batches: Iterable[KeyRoute] | None = None,
    more: Iterable[KeyRoute] = (),
) -> Door:
    """Return the public port's application, `batches` being the routes of files too; may raise `ConfigError`."""
    bodies = services.bodies
    responses_endpoint = ResponsesEndpoint(responses, bodies)
    endpoints: list[Endpoint] = [
        ChatEndpoint(bodies),
        CompletionEndpoint(bodies),
        MessagesEndpoint(bodies),
        responses_endpoint,
        CompactEndpoint(responses, bodies),
        EmbeddingsEndpoint(bodies),
        RerankEndpoint(bodies),
        ScoreEndpoint(bodies),
    ]
    logged = {endpoint.name: endpoint for endpoint in endpoints if endpoint.is_logged}
    stored = StoredResponses(responses, services.config.allow_unknown_parameters)
    routes: list[KeyRoute] = [
        count_tokens_route(services),
        input_tokens_route(services, responses_endpoint),
        *StreamRoutes(streams, service, logged, services, stored).routes(),
        *stored.routes(),
        *(unserved_routes() if batches is None else batches),
        *more,
    ]
    return create_app(services, service, endpoints, routes, [OPENAPI_ROUTE], observer)
