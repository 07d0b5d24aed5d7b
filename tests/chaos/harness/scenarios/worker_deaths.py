"""Workers that die, freeze, drain or run out of memory under a mixed load."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.harness import disturbance
from tests.chaos.harness.disturbance import Disturbance
from tests.chaos.harness.faults import Drain, Fault, Freeze, Kill, Squeeze
from tests.chaos.harness.mix import mixed_bodies, plain_bodies
from tests.chaos.harness.outcome import Outcome
from tests.chaos.harness.system import SystemOptions

NUM_WORKERS = 3
GAP_P99_S = 1.5
_SIMULATED = SystemOptions(num_gateways=2, num_workers=NUM_WORKERS)
_REAL = SystemOptions(num_gateways=1, num_workers=2, simulate_ms=None, worker={"num_blocks": 600, "dtype": "float32"})
_DEATH_PROMISE = "0 failed, p99 <= 1.5 s"


async def sigkill(num_requests: int | None) -> Outcome:
    """SIGKILL of one of three workers every other second."""
    return await _deaths("worker-sigkill", lambda n: [Kill(0.5, 1.0, _victim(n))], num_requests or 1500)


async def sigstop(num_requests: int | None) -> Outcome:
    """SIGSTOP of one of three workers, for half a second and for six seconds in turn."""
    return await _deaths(
        "worker-sigstop", lambda n: [Freeze(0.5, (0.5, 6.0)[n % 2], (_victim(n),))], num_requests or 1500
    )


async def sigterm(num_requests: int | None) -> Outcome:
    """Rolling restart: one worker after the other drains and comes back."""
    return await _deaths("worker-sigterm", lambda n: [Drain(0.5, 0.2, _victim(n))], num_requests or 1000)


async def out_of_memory(num_requests: int | None) -> Outcome:
    """A worker gets no memory any more for three seconds; then it is killed and comes back."""
    return await _deaths("worker-oom", lambda n: [Squeeze(0.5, 3.0, _victim(n))], num_requests or 1000)


async def sigkill_real(num_requests: int | None) -> Outcome:
    """SIGKILL of one of two workers that run the demo model."""
    return await disturbance.run(
        Disturbance(
            "worker-sigkill-real",
            "0 failed",
            _REAL,
            mixed_bodies(60, 8),
            lambda n: [Kill(1.0, 0.5, f"worker-{n % 2}")],
            concurrency=6,
            num_requests=num_requests or 120,
        )
    )


async def three_deaths(num_requests: int | None) -> Outcome:
    """Long streams meet three deaths of workers, five seconds apart, each after hundreds of tokens."""

    def schedule(number: int) -> Sequence[Fault]:
        # All workers but one die, so that every stream is sure to be hit in each wave.
        return [Kill(at, 1.0, f"worker-{index}") for at in (3.0, 8.0, 13.0) for index in (0, 1)]

    return await disturbance.run(
        Disturbance(
            "three-deaths",
            "0 failed, p99 <= 3 s",
            SystemOptions(num_workers=2),
            plain_bodies(1400, 8),
            schedule,
            concurrency=8,
            tail_s=0.0,
            max_silence_p99_s=3.0,
        )
    )


async def _deaths(case: str, schedule: object, num_requests: int) -> Outcome:
    return await disturbance.run(
        Disturbance(
            case,
            _DEATH_PROMISE,
            _SIMULATED,
            mixed_bodies(50),
            schedule,  # type: ignore[arg-type]
            concurrency=32,
            num_requests=num_requests,
            max_silence_p99_s=GAP_P99_S,
        )
    )


def _victim(number: int) -> str:
    return f"worker-{number % NUM_WORKERS}"
