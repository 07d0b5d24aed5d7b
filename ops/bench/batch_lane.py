"""What a backlog of batch jobs costs the interactive requests beside it, and how fast it runs alone.

Run as `python -m ops.bench.batch_lane`. The whole system serves the demo model on this machine's CPU. First the backlog
runs alone. Then a number of connections ask for one stream after the other, in turns without and beside a backlog that
never ends; a turn without is the baseline of the turn beside it. Ratios of the pooled turns are what counts. Loopback
only, bounded; results are appended to `results/batch_lane.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError

from ops.bench.load.systems import address_of, headrace_up
from ops.bench.options import add_list, bench_parser
from ops.bench.record import ResultTable
from ops.load_generator.connection import Address
from ops.load_generator.rounds import Samples, count_streams
from ops.simulation.outcome import percentile
from ops.stack.plan import DEMO_MODEL_NAME
from shared.batch_streams import batch_stream
from shared.subjects import request_subject, result_subject

_SETTLE_S = 14.0
"""Ten seconds without an interactive request, after which batch jobs may use all of the machine, and some to spare."""

_FIGURES = ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms")
_COLUMNS = ("load", "concurrency", *_FIGURES, "batch_tokens_per_s")
_PROMPT = "Once upon a time there was a"
_TENANT = "default"
_NUM_JOBS = 400
"""Jobs kept in the queue: more than any worker holds."""

_JOB_PROMPT = "Write a story about a dog and a cat who live near the river and like to play. " * 3
_JOB_TOKENS = 64
_QUIET_S = 0.7


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and record it."""
    parser = bench_parser("batch_lane", __doc__)
    parser.add_argument("--num-threads", type=int, default=1, help="Threads of the engine.")
    add_list(parser, "--concurrency", int, [1, 8], "Connections.")
    parser.add_argument("--turns", type=int, default=4, help="Turns of each kind.")
    parser.add_argument("--requests", type=int, default=25, help="Streams of a connection in a turn.")
    parser.add_argument("--tokens", type=int, default=100, help="Tokens of a stream.")
    parser.add_argument("--alone-s", type=float, default=8.0, help="Seconds for which the backlog runs alone.")
    options = parser.parse_args(arguments)
    environ = os.environ | {"HEADRACE_NUM_THREADS": str(options.num_threads)}
    with headrace_up([], environ) as info:
        asyncio.run(_measure(info, options))


async def _measure(info: dict[str, Any], options: argparse.Namespace) -> None:
    address = address_of(info, DEMO_MODEL_NAME)
    backlog = await Backlog.connect(info["nats_url"], info["admin_nats_url"], address.model)
    table = ResultTable("batch_lane", _COLUMNS)
    try:
        rate = await _alone(backlog, options.alone_s)
        table.add({"load": "batch alone", "batch_tokens_per_s": round(rate, 1)})
        for concurrency in options.concurrency:
            requests = [address.completion(_PROMPT, options.tokens, temperature=1.0)] * concurrency
            turns: dict[bool, list[tuple[Samples, float]]] = {False: [], True: []}
            for number in range(-1, options.turns):
                for is_beside in (False, True) if number % 2 else (True, False):
                    turn = await _turn(backlog, address, requests, options, is_beside)
                    if number >= 0:  # the first pair warms up
                        turns[is_beside].append(turn)
            for row in _rows(concurrency, turns):
                table.add(row, num_threads=options.num_threads)
    finally:
        await backlog.close()


async def _alone(backlog: Backlog, duration_s: float) -> float:
    """Return the tokens per second of the backlog alone."""
    async with backlog.kept_up():
        await asyncio.sleep(_SETTLE_S)
        rate = await backlog.rate(duration_s)
    return rate


async def _turn(
    backlog: Backlog, address: Address, requests: list[bytes], options: argparse.Namespace, is_beside: bool
) -> tuple[Samples, float]:
    """Return what the streams of one turn saw, and the tokens per second of the backlog meanwhile."""
    if not is_beside:
        return await count_streams(address, requests, options.requests), 0.0
    async with backlog.kept_up():
        await asyncio.sleep(0.5)
        before = backlog.num_tokens
        samples = await count_streams(address, requests, options.requests)
        return samples, (backlog.num_tokens - before) / samples.elapsed_s


def _rows(concurrency: int, turns: dict[bool, list[tuple[Samples, float]]]) -> list[dict[str, object]]:
    """Return the pooled figures without and beside the backlog, and their ratios."""
    figures = {is_beside: _figures([samples for samples, _ in taken]) for is_beside, taken in turns.items()}
    rate = statistics.mean(rate for _, rate in turns[True])
    ratios = {name: figures[True][name] / value for name, value in figures[False].items()}
    shown = {"without": figures[False], "beside": figures[True], "ratio": ratios}
    return [
        {"load": load, "concurrency": concurrency}
        | {name: round(value, 3) for name, value in values.items()}
        | ({"batch_tokens_per_s": round(rate, 1)} if load == "beside" else {})
        for load, values in shown.items()
    ]


def _figures(turns: list[Samples]) -> dict[str, float]:
    failures = sum(samples.num_failures for samples in turns)
    if failures:
        raise SystemExit(f"{failures} streams failed")
    gaps = [gap for samples in turns for gap in samples.gaps_s]
    waits = [wait for samples in turns for wait in samples.ttft_s]
    percentiles = (percentile(values, percent) for values in (gaps, waits) for percent in (50, 99))
    return dict(zip(_FIGURES, (value * 1e3 for value in percentiles), strict=True))


class Backlog:
    """Publishes jobs and counts the tokens of their results.

    Attributes:
        num_tokens: Generated tokens of all results so far.
    """

    def __init__(self, batch: Client, admin: Client, model: str) -> None:
        self._batch = batch
        self._admin = admin
        self._model = model
        self._num_published = 0
        self._num_done = 0
        self._last_done = 0.0
        self._is_full = asyncio.Event()
        self._is_kept = False
        self.num_tokens = 0

    @classmethod
    async def connect(cls, batch_url: str, admin_url: str, model: str) -> Backlog:
        """Connect, and listen for results."""
        backlog = cls(await nats.connect(batch_url), await nats.connect(admin_url), model)
        subject = result_subject(_TENANT, "x").removesuffix("x") + "*"
        await backlog._batch.subscribe(subject, cb=backlog._receive)
        return backlog

    async def close(self) -> None:
        """Disconnect."""
        await self._batch.close()
        await self._admin.close()

    @contextlib.asynccontextmanager
    async def kept_up(self) -> AsyncIterator[None]:
        """Keep the queue full until the block ends; then drop what waits, and wait for what runs."""
        self._num_published = self._num_done = 0
        self._is_full.clear()
        self._is_kept = True
        keeping = asyncio.create_task(self._keep())
        try:
            await self._is_full.wait()
            yield
        finally:
            # A cancellation that meets the answer of a publication is lost (`asyncio.wait_for` of Python 3.11).
            self._is_kept = False
            await asyncio.gather(keeping, return_exceptions=True)
            await self._drop_waiting()
            self._last_done = time.monotonic()
            while (left := self._last_done + _QUIET_S - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left)

    async def _drop_waiting(self) -> None:
        """Delete the jobs one by one: a purge of the queue is closed in the shipped configuration of NATS."""
        js, stream = self._admin.jetstream(), batch_stream(_TENANT)
        state = (await js.stream_info(stream)).state
        for seq in range(state.first_seq, state.last_seq + 1):
            with contextlib.suppress(APIError):
                await js.delete_msg(stream, seq)

    async def rate(self, duration_s: float) -> float:
        """Return the tokens per second of the next seconds."""
        before, started = self.num_tokens, time.monotonic()
        await asyncio.sleep(duration_s)
        return (self.num_tokens - before) / (time.monotonic() - started)

    async def _keep(self) -> None:
        js, subject = self._batch.jetstream(), request_subject(self._model, "batch", _TENANT)
        sampling = {"max_tokens": _JOB_TOKENS, "temperature": 0.0, "ignore_eos": True}
        while self._is_kept:
            while self._is_kept and self._num_published - self._num_done < _NUM_JOBS:
                number = time.time_ns()
                job = {"id": f"job-{number}", "model": self._model, "lane": "batch", "sampling": sampling}
                await js.publish(subject, json.dumps(job | {"text": f"{number} {_JOB_PROMPT}"}).encode())
                self._num_published += 1
            self._is_full.set()
            await asyncio.sleep(0.02)

    async def _receive(self, message: Msg) -> None:
        self._num_done += 1
        self._last_done = time.monotonic()
        self.num_tokens += json.loads(message.data)["completion_tokens"]


if __name__ == "__main__":
    main()
