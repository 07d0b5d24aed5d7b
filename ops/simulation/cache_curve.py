"""How many prompt tokens of agents are found in a cache of a size, with and without hints, as a plot.

`python -m ops.simulation.cache_curve` prints the figures and writes the plot of `ops/docs/kv-tiers.md`. Schedulers,
block pools, affinity and the policies of tiers are the real ones; four workers share files. Hits are given as a share
of what `oracle_hits` finds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.chart import Line, line_chart, picture
from ops.simulation.agents import AgentTrace, oracle_hits
from ops.simulation.scenario import Scenario, simulate
from ops.simulation.step_time import LinearTimes, StepTimes
from ops.simulation.tiers import TierSizes
from ops.text_table import aligned

PLOT = Path(__file__).parents[1] / "docs" / "assets" / "kv-hints.svg"
BLOCK_SIZE = 64
WORKERS = 4
CONFIG = SchedulerConfig(BLOCK_SIZE, num_blocks=128, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=8192)
TIMES = StepTimes(LinearTimes(0.008, 1.5e-4, 5e-5, 1e-8, 1e-10))
FILES = (0, 256, 512, 1024, 2048, 4096)
BYTES_A_TOKEN = 131_072
"""Of a model of 8 billion parameters with grouped queries, in 16 bits."""

_HOST_BLOCKS = 32
_LOADS_PER_S = 2000.0


@dataclass(frozen=True, slots=True)
class Point:
    """Shares of the oracle's hits, for files of a size.

    Attributes:
        gigabytes: The devices', the hosts' and the files' memory together.
    """

    gigabytes: float
    plain: float
    hinted: float


def curve(trace: AgentTrace, seed: int, files: tuple[int, ...] = FILES) -> list[Point]:
    """Simulate each size with and without hints."""
    arrivals = list(trace.arrivals(seed, has_hints=True))
    oracle = oracle_hits(arrivals, BLOCK_SIZE)
    points = []
    for num_blocks in files:
        tiers = TierSizes(_HOST_BLOCKS, num_blocks, _LOADS_PER_S) if num_blocks else None
        scenario = Scenario(WORKERS, CONFIG, TIMES, ttft_slo_s=1e6, is_affine=True, tiers=tiers)
        found = []
        for has_hints in (False, True):
            outcome = simulate(scenario, trace.arrivals(seed, has_hints=has_hints))
            assert outcome.num_served == len(arrivals), "a request was not served"
            found.append(outcome.num_cached_tokens / oracle)
        total = WORKERS * (CONFIG.num_blocks + (_HOST_BLOCKS if num_blocks else 0)) + num_blocks
        points.append(Point(total * BLOCK_SIZE * BYTES_A_TOKEN / 1e9, *found))
    return points


def table(points: list[Point]) -> list[str]:
    """Return the figures as aligned lines of text."""
    rows = [(f"{p.gigabytes:.1f} GB", f"{p.plain:.3f}", f"{p.hinted:.3f}") for p in points]
    return aligned([("memory of all", "without hints", "with hints"), *rows])


def plot(points: list[Point]) -> str:
    """Return the curve as SVG."""
    title = "Hits of an agent trace as a share of unbounded memory, by gigabytes of cache on four workers"
    sizes = [point.gigabytes for point in points]
    lines = [
        Line("with hints", sizes, [point.hinted for point in points]),
        Line("without hints", sizes, [point.plain for point in points]),
    ]
    least = min(y for line in lines for y in line.y)
    return picture(line_chart(title, "gigabytes, all workers and files", lines, bottom=int(least * 20) / 20))


def main() -> None:
    """Print the figures, and write the plot."""
    points = curve(AgentTrace(), seed=7)
    sys.stdout.write("\n".join(table(points)) + "\n")
    PLOT.write_text(plot(points))


if __name__ == "__main__":
    main()
