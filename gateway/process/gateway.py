"""A gateway process from start to end: assemble the parts, serve until the stop signal, drain.

`main` is the entry point. With `processes > 1` it forks children that share the port and only supervises them. A
process accepts connections once it knows the fleet: until then it would refuse requests for models that are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop

from gateway.config import GatewayConfig
from gateway.process.assembly import assemble, running
from gateway.process.listeners import Listeners, bind_listeners, return_freed_memory, url_of
from gateway.process.process_metrics import MetricsBoard
from gateway.process.processes import SLOTS_PER_PROCESS, ParentLink, ProcessGroup, ProcessState
from gateway.process.settings_check import check_settings
from shared.audit import audited_drain, nats_login
from shared.errors import HeadraceError
from shared.task_supervisor import TaskSupervisor
from shared.telemetry import configure_logging

# Requests allocate many small objects that die young: by default the collector is a quarter of their cost.
GC_THRESHOLDS = (50_000, 20, 50)
# So long the event loop waits for a thread that reads a large body.
SWITCH_INTERVAL_S = 0.0005

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)


def main(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status, or raise `HeadraceError` if it cannot begin."""
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
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, listeners, slot, link, board))


async def _serve(
    config: GatewayConfig, listeners: Listeners, slot: int, link: ParentLink | None, board: MetricsBoard | None
) -> int:
    """Serve until the stop signal, or until an essential task has died; return the exit status."""
    stop, tasks = asyncio.Event(), TaskSupervisor()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        if link is not None:
            loop.add_reader(link.parent_pipe, stop.set)
            await stack.enter_async_context(running(tasks, link.beat_forever(), "beats"))
        parts = await _unless_stopped(stop, assemble(stack, config, slot, board, tasks))
        if parts is None:
            return 0
        if listeners.operator is not None:
            await parts.operator.start(listeners.operator)
            stack.push_async_callback(parts.operator.close)
        own = listeners.public[0 if link is None else link.socket_index]
        await parts.public.start(own, [other for other in listeners.public if other is not own])
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
            await parts.public.drain(config.drain_timeout_s, parts.cut)
    return 1 if tasks.has_failed.is_set() else 0


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of `work`, or None if the process gets a stop signal first: `work` may wait for NATS."""
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
