"""Cost of scheduling: µs per step (schedule + settle) at a full decode batch, with few and many sequences waiting.

Run as `python -m ops.bench.scheduler`. The runner costs nothing here, so this is what the scheduler adds to every step
of every engine whose runner computes at once; with a second step in flight the device computes meanwhile. The cost must
not depend on how many sequences wait.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from gpu_worker.core.scheduler import Scheduler, SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, StepPlan, StepResult
from ops.bench.record import append_record
from shared.sampling import Sampling

NUM_RUNNING = 256
PROMPT_TOKENS = 64
NUM_STEPS = 2000


def full_scheduler(num_waiting: int) -> Scheduler:
    """Return a scheduler of `NUM_RUNNING` sequences that will all run, and `num_waiting` behind them."""
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=16,
            num_blocks=NUM_RUNNING * (PROMPT_TOKENS + NUM_STEPS + 100) // 16,
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=2048,
            max_model_len=8192,
        )
    )
    for index in range(NUM_RUNNING + num_waiting):
        prompt = list(range(index, index + PROMPT_TOKENS))
        scheduler.add(
            Sequence(
                id=f"sequence-{index}",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=Sampling(),
                max_tokens=NUM_STEPS + 50,
                eos_token_ids=frozenset([1, 2]),
                arrival=float(index),
                deadline=1e12,
            )
        )
    return scheduler


def measure(num_waiting: int, depth: int) -> list[float]:
    """Return the µs of each step with `num_waiting` sequences waiting and `depth` steps in flight at most."""
    scheduler = full_scheduler(num_waiting)
    token, nothing = SampledTokens((7,)), SampledTokens()
    in_flight: deque[StepPlan] = deque()
    durations = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        while len(in_flight) < depth and (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append(plan)
        planned = time.perf_counter()
        oldest = in_flight.popleft()
        result = StepResult(oldest.step, [token if item.samples else nothing for item in oldest.scheduled])
        executed = time.perf_counter()
        scheduler.settle(oldest, result)
        durations.append((planned - started + time.perf_counter() - executed) * 1e6)
    return durations[50:]


def main() -> None:
    """Print the table and append its rows to the results."""
    print(f"{'in flight':>9} {'running':>8} {'waiting':>8} {'p50 µs/step':>12} {'p99 µs/step':>12}")
    for depth in (1, 2):
        for num_waiting in (0, 10_000):
            durations = measure(num_waiting, depth)
            row = {
                "steps_in_flight": depth,
                "running": NUM_RUNNING,
                "waiting": num_waiting,
                "p50_us": round(statistics.median(durations), 1),
                "p99_us": round(statistics.quantiles(durations, n=100)[98], 1),
            }
            print("{:>9} {:>8} {:>8} {:>12} {:>12}".format(*row.values()))
            append_record("scheduler", "python -m ops.bench.scheduler", row)


if __name__ == "__main__":
    main()
