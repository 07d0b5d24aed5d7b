"""Cost of scheduling: µs per step (schedule + settle) at a full decode batch, with few and many sequences waiting.

Run as `python -m ops.bench.scheduler`. The runner costs nothing here, so this is what the scheduler adds to every step
of every engine whose runner computes at once; with a second step in flight the device computes meanwhile. The cost must
not depend on how many sequences wait.

In the first rows half of the steps fill blocks of 32 sequences, as many as began in one step, and the others none: the
tenth percentile is that of steps that fill none, and the median lies near that of the others. In the other rows prompts
differ in length, so that every step fills the blocks of 16 sequences; and so with layers that keep a window of tokens,
or a state.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence as Values
from dataclasses import dataclass

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, ScheduledStep, StepResult
from ops.bench.options import bench_parser
from ops.bench.record import ResultTable
from shared.sampling import Sampling

NUM_RUNNING = 256
PROMPT_TOKENS = 64
NUM_STEPS = 2000
BLOCK = 16
BLOCKS = NUM_RUNNING * (PROMPT_TOKENS + NUM_STEPS + 100) // BLOCK


@dataclass(frozen=True, slots=True)
class Load:
    """What is scheduled.

    Attributes:
        depth: Steps in flight at most.
        num_waiting: Sequences behind those that run.
        is_spread: Blocks are filled in all steps alike.
        windows: Groups of layers that keep the last tokens.
        state: Of recurrent layers.
    """

    name: str
    depth: int = 1
    num_waiting: int = 0
    is_spread: bool = False
    windows: tuple[WindowConfig, ...] = ()
    state: StateConfig | None = None


LOADS = (
    Load("plain"),
    Load("plain", num_waiting=10_000),
    Load("plain", depth=2),
    Load("plain", depth=2, num_waiting=10_000),
    Load("spread", is_spread=True),
    Load("window", is_spread=True, windows=(WindowConfig(512, NUM_RUNNING * 40),)),
    Load("state", is_spread=True, state=StateConfig(NUM_RUNNING * 3 // 2, 64)),
)


def full_scheduler(load: Load) -> Scheduler:
    """Return a scheduler of `NUM_RUNNING` sequences that will all run, and those that wait behind them."""
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=BLOCK,
            num_blocks=BLOCKS,
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=2048,
            max_model_len=8192,
            windows=load.windows,
            state=load.state,
        )
    )
    for index in range(NUM_RUNNING + load.num_waiting):
        num_tokens = PROMPT_TOKENS + index % BLOCK * load.is_spread
        prompt = list(range(index, index + num_tokens))
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


def measure(load: Load) -> list[float]:
    """Return the µs of each step."""
    scheduler = full_scheduler(load)
    token, nothing = SampledTokens((7,)), SampledTokens()
    in_flight: deque[ScheduledStep] = deque()
    durations = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        while len(in_flight) < load.depth and (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append(plan)
        planned = time.perf_counter()
        oldest = in_flight.popleft()
        result = StepResult(oldest.step, [token if item.samples else nothing for item in oldest.scheduled])
        executed = time.perf_counter()
        scheduler.settle(oldest, result)
        durations.append((planned - started + time.perf_counter() - executed) * 1e6)
    return durations[50:]


def main(arguments: Values[str] | None = None) -> None:
    """Print the table and append its rows to the results."""
    bench_parser("scheduler", __doc__).parse_args(arguments)
    table = ResultTable("scheduler")
    for load in LOADS:
        percentiles = statistics.quantiles(measure(load), n=100)
        row = {
            "load": load.name,
            "steps_in_flight": load.depth,
            "running": NUM_RUNNING,
            "waiting": load.num_waiting,
            "p10_us": round(percentiles[9], 1),
            "p50_us": round(percentiles[49], 1),
            "p99_us": round(percentiles[98], 1),
        }
        table.add(row)


if __name__ == "__main__":
    main()
