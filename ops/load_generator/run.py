"""A whole run: how many tokens a word has, the sessions, their sending, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.load_generator.agents import AgentLoad
from ops.load_generator.driver import Driver, Wire
from ops.load_generator.record import VERSION, Report
from ops.load_generator.sessions import Session, TokenScale, Turn, conversations, from_file, picture, single_requests
from ops.load_generator.summary import summarize
from ops.simulation.workload import Synthetic, read_trace
from shared.errors import HeadraceError

_PROGRESS_S = 0.5
_PROBES = (16, 144)
_NUM_PICTURES = 16

Progress = Callable[[Driver, int], None]


class ProbeError(HeadraceError):
    """The server does not answer as a server of this API does."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load, by the options of `headrace bench serve`; without `requests`, the whole trace."""

    dataset_name: str
    dataset_path: Path | None
    requests: int | None
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    random_input_len: int
    random_output_len: int
    random_prefix_len: int
    prefixes: int
    spread: float
    turns: int
    images: int
    image_size: tuple[int, int]
    answer_timeout_s: float
    seed: int

    def sessions(self, scale: TokenScale) -> list[Session]:
        """Return the sessions with their times.

        Raises:
            TraceError: The file cannot be used.
        """
        if self.dataset_name == "trace":
            assert self.dataset_path is not None
            return single_requests(read_trace(self.dataset_path, self.requests), scale, self._pictures(), self.seed)
        assert self.requests is not None
        prompt, output, prefix = self.random_input_len, self.random_output_len, self.random_prefix_len
        rate = math.inf if self.request_rate is None else self.request_rate
        lengths = (prefix + prompt, output, self.spread, self.burstiness)
        drawn = Synthetic(self.requests, rate, *lengths, shared_prefix=prefix, num_prefixes=self.prefixes).arrivals(
            self.seed
        )
        if self.dataset_name == "agents":
            agents = AgentLoad(self.turns, self.prefixes, max(1, prefix), prompt, output)
            return conversations(drawn, agents, self.seed, scale)
        if self.dataset_name in ("sharegpt", "custom"):
            assert self.dataset_path is not None
            return from_file(self.dataset_path, drawn)
        return single_requests(drawn, scale, self._pictures(), self.seed)

    def _pictures(self) -> list[tuple[str, ...]]:
        draw = random.Random(f"pictures/{self.seed}")
        if not self.images:
            return []
        return [tuple(picture(*self.image_size, draw) for _ in range(self.images)) for _ in range(_NUM_PICTURES)]


async def measure(
    wire: Wire, load: Load, slo_ms: dict[str, float], asked: dict[str, Any], progress: Progress
) -> Report:
    """Send a load, until all has been answered or SIGINT comes.

    The report says `asked` of the load. A good request keeps the limits `slo_ms`. `progress` is called twice a second.

    Raises:
        ProbeError: The server does not answer as it should before the run.
        TraceError: The file cannot be used.
    """
    scale = await _token_scale(Driver(wire, timeout_s=load.answer_timeout_s))
    sessions = load.sessions(scale)
    num_planned = sum(len(session.turns) for session in sessions)
    is_closed = load.request_rate is None and load.dataset_name != "trace"
    limit, timeout_s = load.max_concurrency, load.answer_timeout_s
    driver = Driver(wire, max_concurrency=limit, timeout_s=timeout_s, is_closed_loop=is_closed)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    async with _interruptible() as stopped, _reported(driver, num_planned, progress):
        await driver.run(sessions, stopped)
    duration_s = time.monotonic() - driver.started
    return Report(
        VERSION,
        started,
        f"{'https' if wire.address.is_tls else 'http'}://{wire.address.host}:{wire.address.port}{wire.address.prefix}",
        wire.address.model,
        asked,
        round(duration_s, 6),
        num_planned - len(driver.records) if stopped.is_set() else 0,
        is_closed,
        slo_ms,
        summarize(driver.records, duration_s, slo_ms),
        driver.records,
    )


async def _token_scale(driver: Driver) -> TokenScale:
    """Ask two short things: they warm up, and the usage tells how many tokens words become."""
    readings = [await driver.ask(Turn(TokenScale().words(range(number)), 1)) for number in _PROBES]
    await driver.close()
    for reading in readings:
        if reading.problem is not None and reading.problem != "no token":
            told = "" if reading.retry_after_s is None else f", Retry-After {reading.retry_after_s} s"
            raise ProbeError(f"the server does not answer a first request: {reading.problem}{told}")
    few, many = (reading.prompt_tokens for reading in readings)
    if not few or not many:
        return TokenScale()
    return TokenScale.measured((_PROBES[0], few), (_PROBES[1], many))


@contextlib.asynccontextmanager
async def _interruptible() -> AsyncIterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; the second one ends the process as usual."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        if not stopped.is_set():
            loop.remove_signal_handler(signal.SIGINT)


@contextlib.asynccontextmanager
async def _reported(driver: Driver, num_planned: int, progress: Progress) -> AsyncIterator[None]:
    async def report() -> None:
        while True:
            progress(driver, num_planned)
            await asyncio.sleep(_PROGRESS_S)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
