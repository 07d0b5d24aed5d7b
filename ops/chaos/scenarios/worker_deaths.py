"""Workers that die, freeze, drain or run out of memory under a mixed load."""

from __future__ import annotations

from functools import partial

from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Drain, Freeze, Kill, Squeeze
from ops.chaos.mix import constrained_bodies, mixed_bodies, plain_bodies
from ops.chaos.system import SystemOptions

NUM_WORKERS = 3
GAP_P99_S = 1.5
# Sixty requests are in line, and the survivor answers six a second: the last one waits ten seconds for a first token.
QUEUED_GAP_P99_S = 12.0
# Times that all workers die in the life of a stream: three were once enough to fail an innocent one.
NUM_WAVES = 3


def _victim(number: int) -> str:
    return f"worker-{number % NUM_WORKERS}"


_deaths = partial(
    Disturbance,
    promise="0 failed, p99 <= 1.5 s",
    options=SystemOptions(num_gateways=2, num_workers=NUM_WORKERS),
    bodies=mixed_bodies(50),
    concurrency=32,
    max_silence_p99_s=GAP_P99_S,
)

WORKER_DEATHS = (
    # One of three workers is killed every other second, under documents and calls that keep to a schema too.
    _deaths(
        "worker-sigkill",
        bodies=(*mixed_bodies(50), *constrained_bodies(50)),
        schedule=lambda n: [Kill(0.5, 1.0, _victim(n))],
        num_requests=1500,
    ),
    # One of two workers is killed while four times as many requests wait as can run: no wait is longer than the line.
    Disturbance(
        "worker-sigkill-queue",
        f"0 failed, p99 <= {QUEUED_GAP_P99_S:g} s",
        SystemOptions(num_gateways=2, num_workers=2, worker={"max_num_seqs": 6}),
        plain_bodies(100, 8),
        lambda n: [Kill(1.0, 4.0, f"worker-{n % 2}")],
        concurrency=60,
        num_requests=300,
        max_silence_p99_s=QUEUED_GAP_P99_S,
    ),
    # One of three workers is stopped, for half a second and for six seconds in turn.
    _deaths("worker-sigstop", schedule=lambda n: [Freeze(0.5, (0.5, 6.0)[n % 2], (_victim(n),))], num_requests=1500),
    # Rolling restart: one worker after the other drains and comes back.
    _deaths("worker-sigterm", schedule=lambda n: [Drain(0.5, 0.2, _victim(n))], num_requests=1000),
    # A worker gets no memory any more for three seconds; then it is killed and comes back.
    _deaths("worker-oom", schedule=lambda n: [Squeeze(0.5, 3.0, _victim(n))], num_requests=1000),
    # All workers die at once, again five seconds after they are back: every stream is hit each time, hundreds of tokens
    # apart, and goes on when a worker has started.
    Disturbance(
        "three-deaths",
        f"0 failed, back + {GAP_P99_S} s",
        SystemOptions(num_workers=2),
        plain_bodies(1400, 8),
        lambda n: [Kill(4.0, 1.0, f"worker-{index}") for index in (0, 1)],
        concurrency=8,
        num_requests=8,
        max_recovery_p99_s=GAP_P99_S,
        # It includes three starts of two workers on a busy machine.
        timeout_s=180.0,
        min_faults=2 * NUM_WAVES,
    ),
)
