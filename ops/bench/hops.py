"""Where the time to first token of one request goes on an idle system: `python -m ops.bench.hops`.

Starts NATS, Redis, a gateway and a worker whose functions are marked from outside (`hop_marks`), sends one request at a
time, and prints for each station the median time since the client began to send. Three cases: an answer from the cache,
a step of no length, the demo model. Bounded, and loopback only.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.load.event_streams import Address, percentile
from ops.bench.load.processes import HOST
from ops.bench.load.systems import API_KEY, parts
from ops.bench.options import bench_parser
from ops.bench.record import append_record, command_line
from ops.stack.config import DEMO_MODEL
from ops.stack.plan import DEMO_MODEL_NAME
from ops.stack.ports import free_port
from ops.stack.servers import find_redis_server

CASES = ("cached", "simulated", "demo")
NUM_WARM = 10
# Between requests: processors' caches cool meanwhile, as on an idle system.
PAUSE_S = 0.03


@dataclass(frozen=True, slots=True)
class Trial:
    """One request, in monotonic nanoseconds."""

    sent: int
    first_byte: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line names, print a table for each case, and record it."""
    parser = bench_parser("hops", __doc__)
    parser.add_argument("--requests", type=int, default=200, help="Requests of each case.")
    parser.add_argument("--case", choices=CASES, action="append", help="Only this case; may be repeated.")
    parser.add_argument("--no-marks", action="store_true", help="Only the whole time, without the cost of the marks.")
    options = parser.parse_args(arguments)
    for case in options.case or CASES:
        asked = {"case": case, "pause_ms": PAUSE_S * 1e3, "num_requests": options.requests}
        found = _measure_case(case, options.requests, is_marked=not options.no_marks)
        append_record("hops", command_line("hops"), asked | found)


def _measure_case(case: str, num_requests: int, *, is_marked: bool) -> dict[str, object]:
    """Measure one case, print it, and return what is recorded of it."""
    marks, trials = _measure(case, num_requests, is_marked=is_marked)
    whole_ms = [(trial.first_byte - trial.sent) / 1e6 for trial in trials]
    p50, p99 = (round(percentile(whole_ms, percent), 3) for percent in (50, 99))
    hops = _hops(marks, trials)
    print(f"\n{case}: time to first byte p50 {p50} ms, p99 {p99} ms, {len(trials)} requests")
    before = 0.0
    for name, micros in hops.items():
        print(f"  {micros:7.0f} µs  +{micros - before:5.0f}  {name}")
        before = micros
    return {"ttft_p50_ms": p50, "ttft_p99_ms": p99, "hops_us": hops}


def _measure(case: str, num_requests: int, *, is_marked: bool) -> tuple[list[tuple[int, str]], list[Trial]]:
    with _system(None if case == "demo" else 0.0, is_marked=is_marked) as (port, traces):
        with socket.create_connection((HOST, port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The last warm one of the cached case has filled the cache.
            seeds = [0 if case == "cached" else n for n in range(NUM_WARM + num_requests)]
            trials = [_ask(client, seed) for seed in seeds][NUM_WARM:]
        marks = []
        for trace in traces:
            for line in trace.read_text().splitlines():
                at, _, name = line.partition(" ")
                marks.append((int(at), name))
        return sorted(marks), trials


def _ask(client: socket.socket, seed: int) -> Trial:
    time.sleep(PAUSE_S)
    address = Address(HOST, 0, DEMO_MODEL_NAME, API_KEY)
    request = address.completion(f"def f{seed}(a, b):", 3, ignore_eos=False, temperature=1.0, seed=seed)
    sent = time.monotonic_ns()
    client.sendall(request)
    answer = client.recv(65536)
    first_byte = time.monotonic_ns()
    while not answer.endswith(b"0\r\n\r\n"):
        answer += client.recv(65536)
    if b"data: [DONE]" not in answer:
        raise RuntimeError(f"the answer is not a stream: {answer[:500]!r}")
    return Trial(sent, first_byte)


def _hops(marks: list[tuple[int, str]], trials: list[Trial]) -> dict[str, float]:
    """Return for each station the median time since the send, µs, in order; those that few requests pass are left."""
    times: dict[str, list[float]] = defaultdict(list)
    for trial in trials:
        seen: set[str] = set()
        for at, name in marks[bisect(marks, (trial.sent, "")) :]:
            if at > trial.first_byte:
                break
            if name not in seen:
                seen.add(name)
                times[name].append((at - trial.sent) / 1e3)
        times["client: first byte"].append((trial.first_byte - trial.sent) / 1e3)
    common = {name: values for name, values in times.items() if len(values) * 2 > len(trials)}
    medians = {name: round(statistics.median(values), 1) for name, values in common.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


@contextlib.contextmanager
def _system(simulate_ms: float | None, *, is_marked: bool) -> Iterator[tuple[int, list[Path]]]:
    """Run the system; yield the gateway's port and the files with the marks."""
    redis = find_redis_server()
    if redis is None:
        raise SystemExit("redis-server is needed: pip install 'headrace[embedded]'")
    with parts() as system:
        _, nats_url = system.start_nats()
        redis_port = free_port()
        command = [redis, "--bind", HOST, "--port", str(redis_port), "--save", "", "--dir", str(system.directory)]
        system.start_listener(command, "redis", redis_port)
        traces = [system.directory / f"{role}.marks" for role in ("gpu_worker", "gateway")]
        modules = []
        for trace in traces:
            trace.touch()
            modules.append(["ops.bench.load.hop_marks", trace.stem, str(trace)] if is_marked else [trace.stem])
        settings: dict[str, object] = {"NATS_URL": nats_url, "MODEL": DEMO_MODEL, "SERVED_MODEL_NAME": DEMO_MODEL_NAME}
        if simulate_ms is not None:
            settings["SIMULATE"] = simulate_ms
        system.start([sys.executable, "-m", *modules[0]], "gpu_worker", " serving ", **settings)
        _, port = system.start_gateway(modules[1], nats_url, REDIS_URL=f"redis://{HOST}:{redis_port}")
        time.sleep(1.0)  # heartbeats arrive
        yield port, traces


if __name__ == "__main__":
    main()
