"""A worker process from start to end: `main` loads the model, serves, drains on SIGTERM or SIGINT, and exits.

The exit status is 0 after a drain and 1 after a failure that a restart may mend. A second signal ends the process at
once, without draining.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import uvloop

from gpu_worker.consumer.consumer import Consumer
from gpu_worker.consumer.golden.watch import GoldenSettings, WithdrawRule
from gpu_worker.consumer.request_observer import RequestObserver
from gpu_worker.engine.engine import EngineStats
from gpu_worker.execution.start_up import StartUp
from gpu_worker.start.assembly import Identity, ServedModel, Worker
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import EngineSetup, build_engine, lora_modules, rank_settings
from gpu_worker.start.golden_baseline import VARIABLE, golden_baseline, served_name
from gpu_worker.start.health_port import HealthPort, bind_health_port
from gpu_worker.start.host_settings import check_ranks, with_launcher
from gpu_worker.start.model_revision import served_revision
from gpu_worker.start.nats_check import check_nats
from gpu_worker.start.progress_bar import ProgressBar
from gpu_worker.start.worker_adapters import AdapterAccess
from gpu_worker.structured_output.grammar_tokenizer import UnsupportedTokenizerError
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import read_model_tasks
from gpu_worker.text.tokenizer import ChatSettings, ModelTokenizer
from gpu_worker.text.vocabulary_check import check_vocabulary
from shared.adapter_store import AdapterStore
from shared.audit import audited_drain, nats_login
from shared.direct_client import DirectClient
from shared.disaggregation import as_role
from shared.errors import ConfigError
from shared.files import TemporaryFolder
from shared.grammar import LlguidanceMissingError
from shared.model_hub import hub_id, local_model
from shared.nats_connection import connect
from shared.objects.open import store_of
from shared.request_log import RequestLog
from shared.streams import StreamLimits
from shared.subjects import check_model_name, check_setting, encode_name, worker_subject
from shared.telemetry import configure_logging
from shared.tracing import make_tracing

if TYPE_CHECKING:
    from gpu_worker.execution.ranks.node import Node

# The state that probes see on hosts of a group other than that of rank 0.
_IDLE = EngineStats(
    step=0, running=0, running_batch=0, waiting=0, waiting_batch=0, max_batch_seqs=0, waiting_tokens=0, free_blocks=0,
    total_blocks=0, max_num_seqs=0, num_preemptions=0, num_prefix_queries=0, num_prefix_hits=0, prefill_rate=0,
    decode_rate=0, num_failed_steps=0, is_fatal=False,
)  # fmt: skip

# The engine's thread gets the interpreter back from the loop after so long; the default of 5 ms is several steps.
SWITCH_INTERVAL_S = 0.0005

# For blocks of the KV cache that are still to be written to files when the worker stops.
TIERS_DRAIN_S = 5.0

_log = logging.getLogger(__name__)
_request_log = logging.getLogger("gpu_worker.requests")


def main(config: WorkerConfig) -> int:
    """Run a worker until it is stopped; return the process's exit status.

    `HeadraceError` if a setting is wrong, the model cannot be loaded, or a server we need is missing.
    """
    try:
        config = with_launcher(config, os.environ)
        # Before a model is fetched, NATS is asked or a kernel compiled.
        check_ranks(config)
        config = _with_local_models(config)
        identity = _identity(config)
        configure_logging(config.log_level, config.log_format, role="worker", worker=identity.worker)
        if config.node_rank > 0:
            return serve_host(config)
        with observing(config, identity.worker) as observer:
            return _serve(config, identity, observer)
    except KeyboardInterrupt:  # while loading; later, SIGINT drains
        return 130


def _with_local_models(config: WorkerConfig) -> WorkerConfig:
    """Return the settings with folders in place of ids at the hub; a model without another name is served as its id."""
    if config.draft_model is not None:
        config = dataclasses.replace(config, draft_model=local_model(config.draft_model, "HEADRACE_DRAFT_MODEL"))
    if config.model is None or (name := hub_id(config.model)) is None:
        return config
    folder = local_model(config.model, "HEADRACE_MODEL")
    return dataclasses.replace(config, model=folder, served_model_name=config.served_model_name or name)


def _identity(config: WorkerConfig) -> Identity:
    if config.model is None:
        raise ConfigError("HEADRACE_MODEL", "is required: a directory in Hugging Face's format, or a .gguf file")
    model = served_name(config)
    worker = config.worker_id or f"worker-{secrets.token_hex(4)}"
    # A folder whose name cannot be one needs this setting too.
    check_setting("HEADRACE_SERVED_MODEL_NAME", model, check_model_name)
    check_setting("HEADRACE_WORKER_ID", worker)
    return Identity(worker, model, served_revision(config))


def _serve(config: WorkerConfig, identity: Identity, observer: RequestObserver) -> int:
    assert config.model is not None
    # The tokenizer's own threads would take the cores from the engine for prompts that are encoded one at a time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    check_nats(config, identity)
    health_socket = bind_health_port(config.health_host, config.health_port)
    start_up = StartUp(ProgressBar(sys.stderr))
    model = _served_model(config, identity.model)
    with contextlib.nullcontext() if config.simulate is not None else _subnormals_flushed():
        setup = build_engine(config, model.directory, model.tokenizer, start_up)
        _log.info(start_up.summary())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(config, identity, model, setup, health_socket, observer))


def _subnormals_flushed() -> AbstractContextManager[None]:
    # Not with the imports above: a simulated worker has no torch.
    from gpu_worker.execution.build import subnormals_flushed

    return subnormals_flushed()


def _served_model(config: WorkerConfig, name: str) -> ServedModel:
    assert config.model is not None
    directory = read_model_directory(config.model)
    if config.sampling_defaults != "model":
        directory = dataclasses.replace(directory, sampling_defaults=None)
    tokenizer = ModelTokenizer(directory, ChatSettings(config.chat_format, config.allow_chat_template))
    check_vocabulary(tokenizer, directory)
    tasks = read_model_tasks(directory, tokenizer)
    for task, reason in tasks.unserved.items():
        _log.info("task not served", extra={"task": task, "reason": reason})
    if tasks.generates:
        _prepare_grammars(tokenizer)
    return ServedModel(directory, tokenizer, tasks, golden_settings(config, name, tokenizer.vocab_size))


def golden_settings(config: WorkerConfig, model: str, vocab_size: int) -> GoldenSettings | None:
    """Return what to compare a model with, which clients call `model`; None where no baseline is given.

    `ConfigError` if a file cannot be used, or is the baseline of another model.
    """
    baseline = golden_baseline(config, model)
    if baseline is None:
        return None
    largest = max(max(prompt.token_ids) for prompt in baseline.prompts)
    if largest >= vocab_size:
        problem = f"{config.golden} has token {largest}, and this model has {vocab_size}: it is of another model"
        raise ConfigError(VARIABLE, problem)
    return GoldenSettings(baseline, config.golden_share, cast("WithdrawRule", config.golden_withdraw))


def _prepare_grammars(tokenizer: ModelTokenizer) -> None:
    try:
        _ = tokenizer.grammar_tokenizer
    except (LlguidanceMissingError, UnsupportedTokenizerError) as error:
        _log.warning("requests for structured output will be refused: %s", error)


async def _run(
    config: WorkerConfig,
    identity: Identity,
    model: ServedModel,
    setup: EngineSetup,
    health_socket: socket.socket | None,
    observer: RequestObserver,
) -> int:
    stopping = _stop_signals()
    events = _ConnectionEvents()
    connecting = asyncio.create_task(_connect(config, identity, events))
    if not await _unless_stopping(connecting, stopping):
        return 0
    nats = connecting.result()
    limits, memory_bytes = StreamLimits(), config.image_memory_bytes
    tenants = tuple(name.strip() for name in config.watermark_tenants.split(",") if name.strip())
    files = contextlib.ExitStack()
    access = _adapter_access(config, setup, files)
    own = (memory_bytes, config.prefix_wait_s, tenants, as_role(config.role), access)
    worker = Worker(identity, nats, setup, model, limits, observer, stopping, *own)
    events.consumer = worker.consumer
    health = HealthPort(lambda: worker.stats, lambda: nats.is_connected, lambda: worker.withdrawn)
    if health_socket is not None:
        await health.start(health_socket)
    try:
        if await _start(worker, stopping):
            health.is_taking_requests = True
            _log.info("serving", extra={"model": identity.model, "pid": os.getpid()})
            await _wait_for_any(stopping, worker.has_failed)
            health.is_taking_requests = False
        if not worker.has_failed.is_set():
            # A worker that has failed leaves its requests to the queue: it cannot finish them, and who gives a request
            # back is not counted as lost with it, so one that breaks every worker would never be found.
            _log.info("draining", extra={"timeout_s": config.drain_timeout_s})
            user = nats_login(config.nats_user, config.nats_url, config)
            with audited_drain(config.audit_file, "worker.drain", nats_user=user, timeout_s=config.drain_timeout_s):
                await worker.consumer.drain(config.drain_timeout_s)
    finally:
        await health.close()
        await worker.close()
        await nats.close()
        files.close()
        if setup.tiers is not None:
            await asyncio.to_thread(setup.tiers.close, TIERS_DRAIN_S)
    has_failed = worker.has_failed.is_set()
    _log.info("stopped", extra={"has_failed": has_failed})
    return 1 if has_failed else 0


def _adapter_access(config: WorkerConfig, setup: EngineSetup, files: contextlib.ExitStack) -> AdapterAccess | None:
    """Return how adapters are had, if there are any; `files` removes a store of this worker's own."""
    if setup.adapting is None:
        return None
    place = config.adapters or files.enter_context(TemporaryFolder("headrace-loras-"))
    store = AdapterStore(store_of(place, "HEADRACE_ADAPTERS"))
    return AdapterAccess(store, lora_modules(config), config.max_lora_bytes, config.adapters is not None)


class _ConnectionEvents:
    """Passes events of the connection on to the consumer, once there is one."""

    def __init__(self) -> None:
        self.consumer: Consumer | None = None

    async def lost(self) -> None:
        if self.consumer is not None:
            self.consumer.disconnected()

    async def back(self) -> None:
        if self.consumer is not None:
            self.consumer.reconnected()

    async def closed(self) -> None:
        if self.consumer is not None:
            self.consumer.connection_closed()


async def _start(worker: Worker, stopping: asyncio.Event) -> bool:
    """Start a worker; return False if it is stopped, or fails, while it waits for its queue."""
    starting = asyncio.create_task(worker.start())
    has_started = await _unless_stopping(starting, stopping, worker.has_failed)
    if has_started:
        starting.result()
    return has_started


async def _connect(config: WorkerConfig, identity: Identity, events: _ConnectionEvents) -> DirectClient:
    return await connect(
        config.nats_url,
        role="worker",
        name=identity.worker,
        scope=encode_name(identity.model),
        speaks_on=worker_subject(identity.model, identity.worker),
        user=config.nats_user,
        password=config.nats_password,
        files=config,
        on_disconnect=events.lost,
        on_reconnect=events.back,
        on_close=events.closed,
    )


async def _unless_stopping(work: asyncio.Task[Any], *events: asyncio.Event) -> bool:
    ending = asyncio.create_task(_wait_for_any(*events))
    await asyncio.wait([work, ending], return_when=asyncio.FIRST_COMPLETED)
    is_done = work.done()
    for task in (work, ending):
        task.cancel()
    await asyncio.gather(work, ending, return_exceptions=True)
    return is_done


async def _wait_for_any(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _stop_signals() -> asyncio.Event:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            _log.warning("stopped by a second signal")
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


@contextlib.contextmanager
def observing(config: WorkerConfig, worker: str) -> Iterator[RequestObserver]:
    """Report requests until the block ends, then send the remaining reports; `ConfigError` if tracing cannot start."""
    # Whether a request is traced was decided where its trace began.
    tracing = make_tracing(config.otlp_endpoint, 1.0, "worker", worker)
    log = RequestLog(_request_log, config.request_log_per_s)
    try:
        yield RequestObserver(log, worker, tracing)
    finally:
        log.close()
        if tracing is not None:
            tracing.close()


def serve_host(config: WorkerConfig) -> int:
    """Start ranks for host 0 until this process is ended; `HeadraceError` if settings do not fit or rank 0 refuses."""
    from gpu_worker.execution.ranks.node import Node

    assert config.master_addr is not None
    assert config.group_token is not None
    bound = bind_health_port(config.health_host, config.health_port)
    # The first process of a container has no handler of its own.
    signal.signal(signal.SIGTERM, lambda _, __: sys.exit(0))
    node = Node(rank_settings(config), config.log_level, config.log_format)
    if bound is not None:
        threading.Thread(target=lambda: asyncio.run(_answer_probes(node, bound)), name="health", daemon=True).start()
    node.serve(config.master_addr, config.master_port, config.group_token, config.node_rank)
    return 0


async def _answer_probes(node: Node, bound: socket.socket) -> None:
    health = HealthPort(lambda: _IDLE, lambda: True, lambda: None if node.is_connected else "rank 0 is not there")
    health.is_taking_requests = True
    await health.start(bound)
    await asyncio.Event().wait()
