"""What a backlog of batch jobs costs the people beside it, and how fast it is done when nobody is there.

Run as `python -m ops.bench.batch_lane`. The whole system serves the demo model on this machine's CPU. First the backlog
runs alone. Then a number of connections ask for one stream after the other, in turns without and beside a backlog that
never ends; a turn without is the baseline of the turn beside it. Ratios of the pooled turns are what counts. Loopback
only, bounded; results are appended to `results/batch_lane.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from typing import Any

from ops.bench.load.batch_backlog import Backlog
from ops.bench.load.event_streams import Address, Samples, count_streams, percentile
from ops.bench.load.systems import address_of, headrace_up
from ops.bench.options import add_list, bench_parser
from ops.bench.record import ResultTable
from ops.stack.plan import DEMO_MODEL_NAME

_SETTLE_S = 14.0
"""The worker fills the machine when nobody has been there for ten seconds; starting it asks for an answer."""

_FIGURES = ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms")
_COLUMNS = ("load", "concurrency", *_FIGURES, "batch_tokens_per_s")
_PROMPT = "Once upon a time there was a"


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
    """Return the tokens per second of the backlog with nobody beside it."""
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


if __name__ == "__main__":
    main()
