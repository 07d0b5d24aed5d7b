"""Cost of scheduling: µs per step (schedule + settle) at a full decode batch, with few and many sequences waiting.

Run as `python -m ops.bench.scheduler`. The runner costs nothing here, so this is what the scheduler adds to every step
of every engine. The cost must not depend on how many sequences wait.
"""

from __future__ import annotations

import statistics
import time

from gpu_worker.core.scheduler import Scheduler, SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, StepResult
from shared.messages import Sampling

NUM_RUNNING = 256
PROMPT_TOKENS = 64
NUM_STEPS = 2000


def measure(num_waiting: int) -> list[float]:
    """Return the µs of each step with `NUM_RUNNING` decodes and `num_waiting` sequences behind them."""
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
    token, nothing = SampledTokens((7,)), SampledTokens()
    durations = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        result = StepResult(plan.step, [token if item.samples else nothing for item in plan.scheduled])
        executed = time.perf_counter()
        scheduler.settle(plan, result)
        durations.append((planned - started + time.perf_counter() - executed) * 1e6)
    return durations[50:]


def main() -> None:
    """Print the table."""
    print(f"{'running':>8} {'waiting':>8} {'p50 µs/step':>12} {'p99 µs/step':>12}")
    for num_waiting in (0, 10_000):
        durations = measure(num_waiting)
        p99 = statistics.quantiles(durations, n=100)[98]
        print(f"{NUM_RUNNING:>8} {num_waiting:>8} {statistics.median(durations):>12.1f} {p99:>12.1f}")


if __name__ == "__main__":
    main()
