"""Runs a gateway or a worker that notes when a request passes its stations.

Run as `python -m ops.bench.load.hop_marks ROLE FILE`. The marks are put around functions of this process before it
starts, so the product itself has none. Each is a line of the file: monotonic nanoseconds and the station's name. A mark
costs about two microseconds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.messages import Delta


def _always(name: str) -> Callable[..., str]:
    return lambda *args, **kwargs: name


def _by_tokens(name: str) -> Callable[..., str]:
    """Tell a frame that has tokens from one that only claims."""

    def choose(*args: Any, **kwargs: Any) -> str:
        found: Sequence[Delta] = args[-1] if isinstance(args[-1], list) else args[-1].deltas
        return f"{name} {'first token' if any(delta.token_ids for delta in found) else 'claim'}"

    return choose


@dataclass(frozen=True, slots=True)
class Station:
    """A function, and the name of the mark that is made before (or after) each call, from its arguments."""

    module: str
    qualified_name: str
    name: Callable[..., str]
    is_after: bool = False


GATEWAY = (
    Station("gateway.http1.connection", "Connection.buffer_updated", _always("gateway: request is here")),
    Station("gateway.api.generation_service", "GenerationService.serve", _always("gateway: handler begins")),
    Station("gateway.api.generation_starter", "GenerationStarter.start", _always("gateway: parsed and within limits")),
    Station("gateway.dispatch.publisher", "Publisher.publish", _always("gateway: admitted, cache asked")),
    Station("gateway.dispatch.publisher", "Publisher.publish", _always("gateway: published"), is_after=True),
    Station("gateway.dispatch.frames", "FrameReceiver.accept", _by_tokens("gateway: receives")),
    Station("gateway.http1.exchange", "Exchange.write", _always("gateway: first token written"), is_after=True),
    Station("gateway.http1.exchange", "Exchange.finish", _always("gateway: answer written"), is_after=True),
)
WORKER = (
    Station("gpu_worker.consumer.pull_queue", "PullQueue._receive", _always("worker: pulled")),
    Station("gpu_worker.engine.engine_thread", "EngineThread.add", _always("worker: read and encoded"), is_after=True),
    Station("gpu_worker.engine.engine", "Engine.add", _always("engine: thread has it")),
    Station("gpu_worker.consumer.step_relay", "StepRelay.deliver", _always("engine: step done")),
    Station("gpu_worker.consumer.step_relay", "StepRelay._take_all", _always("worker: loop has the step")),
    Station("gpu_worker.consumer.outbox", "Outbox._send", _by_tokens("worker: sends")),
)
_STATIONS = {"gateway": GATEWAY, "gpu_worker": WORKER}


def main(role: str, path: str) -> int:
    """Put marks around the stations of `role`, and run it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for station in _STATIONS[role]:
        _mark(station, file)
    run: Callable[[], int] = importlib.import_module(f"{role}.__main__").run
    return run()


def _mark(station: Station, file: int) -> None:
    owner: Any = importlib.import_module(station.module)
    *path, last = station.qualified_name.split(".")
    for name in path:
        owner = getattr(owner, name)
    inner = getattr(owner, last)

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        os.write(file, b"%d %b\n" % (time.monotonic_ns(), station.name(*args, **kwargs).encode()))

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not station.is_after:
            note(args, kwargs)
        result = inner(*args, **kwargs)
        if station.is_after:
            note(args, kwargs)
        return result

    @functools.wraps(inner)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        note(args, kwargs)
        return await inner(*args, **kwargs)

    setattr(owner, last, call_async if inspect.iscoroutinefunction(inner) and not station.is_after else call)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
