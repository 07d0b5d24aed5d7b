"""Workers that die, freeze, drain or run out of memory under a mixed load."""

from __future__ import annotations

from ops.chaos import disturbance
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Drain, Freeze, Kill, Squeeze
from ops.chaos.mix import mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.system import SystemOptions

NUM_WORKERS = 3
GAP_P99_S = 1.5
# Sixty requests are in line, and the survivor answers six a second: who is last waits ten seconds for a first token.
QUEUED_GAP_P99_S = 12.0
# In a lifetime: three were once enough to fail an innocent stream.
NUM_WAVES = 3
_SIMULATED = SystemOptions(num_gateways=2, num_workers=NUM_WORKERS)
_REAL = SystemOptions(num_gateways=1, num_workers=2, simulate_ms=None, worker={"num_blocks": 600, "dtype": "float32"})
_DEATH_PROMISE = "0 failed, p99 <= 1.5 s"


async def sigkill(num_requests: int | None) -> Outcome:
    """SIGKILL of one of three workers every other second."""
    return await _deaths("worker-sigkill", lambda n: [Kill(0.5, 1.0, _victim(n))], num_requests or 1500)


async def sigkill_behind_a_queue(num_requests: int | None) -> Outcome:
    """SIGKILL of one of two workers while four times as many wait as can run: nobody waits longer than the line is."""
    return await disturbance.run(
        Disturbance(
            "worker-sigkill-queue",
            f"0 failed, p99 <= {QUEUED_GAP_P99_S:g} s",
            SystemOptions(num_gateways=2, num_workers=2, worker={"max_num_seqs": 6}),
            plain_bodies(100, 8),
            lambda n: [Kill(1.0, 4.0, f"worker-{n % 2}")],
            concurrency=60,
            num_requests=num_requests or 300,
            max_silence_p99_s=QUEUED_GAP_P99_S,
        )
    )


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
    """Long streams meet deaths of all workers at once, each five seconds after those of the last one are back.

    So every stream is hit each time, with hundreds of tokens between. Nobody goes on before a worker has started.
    """
    outcome = await disturbance.run(
        Disturbance(
            "three-deaths",
            f"0 failed, back + {GAP_P99_S} s",
            SystemOptions(num_workers=2),
            plain_bodies(1400, 8),
            lambda n: [Kill(4.0, 1.0, f"worker-{index}") for index in (0, 1)],
            concurrency=8,
            num_requests=num_requests or 8,
            max_recovery_p99_s=GAP_P99_S,
            # Three starts of two workers on a busy machine are among it.
            timeout_s=180.0,
        )
    )
    num_waves = outcome.figures["faults"] // 2
    outcome.expect(num_waves >= NUM_WAVES, f"the streams met {num_waves} deaths of all workers, not {NUM_WAVES}")
    return outcome


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
