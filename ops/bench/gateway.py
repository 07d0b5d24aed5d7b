"""Load on a gateway: requests/s, tokens/s, TTFT, gaps between tokens, CPU per process and per token, peak memory.

`make bench` starts the system with a simulated engine, which makes one token per running sequence every `--step-ms`, so
it measures the gateway, the queue and the worker's consumer. `python -m ops.bench.gateway --isolated` starts
NATS, one gateway and a worker without an engine instead, whose texts carry the time they were made, so that the delay
of each token is known and the gateway saturates first. Both measure, in the same run, the floor: an asyncio server that
only writes the same bytes at the same pace. Bounded, and loopback only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import uvloop

from ops.bench.record import ResultTable, add_list, bench_parser, positive
from ops.bench.systems import (
    HOST,
    StartError,
    Target,
    address_of,
    cpu_seconds,
    descendants,
    headrace_up,
    isolated_gateway,
    parts,
    peak_rss_bytes,
)
from ops.load_generator.connection import Address
from ops.load_generator.rounds import count_streams
from ops.simulation.outcome import percentile
from ops.stack.plan import DEMO_MODEL_NAME


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements of the command line, print a table, and record each row; return 1 if nothing starts."""
    parser = bench_parser("gateway", __doc__)
    parser.add_argument("--isolated", action="store_true", help="Start NATS, a gateway and a worker without an engine.")
    parser.add_argument("--gateways", type=positive, default=1, help="Gateway processes of the whole system.")
    add_list(parser, "--concurrency", positive, [1, 16, 64, 256], "Connections: 1,16,64,256.")
    parser.add_argument("--tokens", type=positive, default=128, help="Tokens per request.")
    parser.add_argument("--rounds", type=positive, default=3, help="Requests per connection.")
    parser.add_argument(
        "--resumable", action="store_true", help="Also streams that survive their gateway, in turns with others."
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="Pace of the engine, and of the floor.")
    options = parser.parse_args(arguments)
    try:
        uvloop.run(_measure_all(options))
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _measure_all(options: argparse.Namespace) -> None:
    table = ResultTable("gateway", _COLUMNS)
    step_ms = options.step_ms
    # Streams that all begin at once would measure how long a crowd waits at the door.
    spread_s = min(5.0, options.tokens * step_ms / 1000)
    with isolated_gateway(step_ms) if options.isolated else _system(step_ms, options.gateways) as target:
        for concurrency in options.concurrency:
            for is_resumable in sorted({False, options.resumable}):
                load = (concurrency, options.tokens, options.rounds, is_resumable)
                await _measure(target, (concurrency, 4, 1, is_resumable), 0.0)
                table.add(await _measure(target, load, spread_s), step_ms=step_ms)
            load = (concurrency, options.tokens, options.rounds, False)
            with _floor(step_ms, options.tokens) as floor:
                table.add(await _measure(floor, load, spread_s), step_ms=step_ms)


async def _measure(target: Target, load: tuple[int, int, int, bool], spread_s: float) -> dict[str, object]:
    """Send requests in rounds on connections that are resumable or not; return the row."""
    concurrency, num_tokens, num_rounds, is_resumable = load
    prompts = (f"stream number {index}" for index in range(concurrency))
    options = {"resumable": is_resumable}
    requests = [target.address.completion(prompt, num_tokens, stream_options=options) for prompt in prompts]
    cpu_before = {role: cpu_seconds(pids) for role, pids in target.pids.items()}
    samples = await count_streams(target.address, requests, num_rounds, spread_s)
    cpu_s = {role: cpu_seconds(pids) - cpu_before[role] for role, pids in target.pids.items()}
    elapsed_s = samples.elapsed_s
    row: dict[str, object] = {
        "target": "resumable" if is_resumable else target.name,
        "concurrency": concurrency,
        "num_tokens": num_tokens,
        "is_resumable": is_resumable,
        "requests_per_s": round(samples.num_requests / elapsed_s, 1),
        "tokens_per_s": round(samples.num_tokens / elapsed_s),
        "failures": samples.num_failures,
        "us_per_token": round(cpu_s["gateway"] / max(1, samples.num_tokens) * 1e6, 2),
        "us_per_request": round(cpu_s["gateway"] / max(1, samples.num_requests) * 1e6, 1),
        "cores": round(cpu_s["gateway"] / elapsed_s, 2),
        "cpu_s": {role: round(seconds, 2) for role, seconds in cpu_s.items()},
        "rss_mb": round(peak_rss_bytes(target.pids["gateway"]) / 2**20),
    }
    for name, values in (("ttft", samples.ttft_s), ("gap", samples.gaps_s), ("delay", samples.delays_s)):
        for percent in (50, 95, 99):
            row[f"{name}_p{percent}_ms"] = round(percentile(values, percent) * 1e3, 2) if values else None
    return row


@contextlib.contextmanager
def _system(step_ms: float, num_gateways: int) -> Iterator[Target]:
    # Steps of one length at any load: what varies is the gateway's, and the floor server's steps do not grow.
    environ = os.environ | {"HEADRACE_SIMULATE_GROWTH": "0"}
    with headrace_up(["--simulate", f"{step_ms:g}", "--gateways", str(num_gateways)], environ) as ready:
        pids = {role: descendants(pids) for role, pids in ready["pids"].items()}
        yield Target("system", address_of(ready, DEMO_MODEL_NAME), pids)


@contextlib.contextmanager
def _floor(step_ms: float, num_tokens: int) -> Iterator[Target]:
    command = [sys.executable, "-m", "ops.bench.floor_server", str(step_ms), str(num_tokens)]
    with parts() as start:
        pid, port = start("floor", command, "\n")
        yield Target("floor", Address(HOST, int(port), "any"), {"gateway": [pid]})


_COLUMNS = (
    *("target", "concurrency", "requests_per_s", "tokens_per_s", "us_per_token", "cores"),
    *("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "delay_p50_ms", "delay_p99_ms", "rss_mb", "failures"),
)


if __name__ == "__main__":
    sys.exit(main())
