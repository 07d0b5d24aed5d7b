"""Requests that wait for the worker with their prefix, beside pulling alone: `python -m ops.bench.affinity`.

Conversations of agents (`ops.load_generator.agents`) on four workers in virtual time, whose schedulers, offers and
claims are those of real workers (`ops/simulation`). `agents` holds them all at once, `paced` one after another,
as many as fit into memory, and then the last turn of each; `unrelated` are prompts that have nothing in common; in
`death` one worker dies and another drains half-way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.bench.load.agent_run import AgentRun
from ops.bench.options import add_list, bench_parser
from ops.bench.record import ResultTable
from ops.load_generator.agents import AgentConversation, AgentLoad, AgentTurn, shared_share
from ops.simulation.fleet import VirtualFleet
from ops.simulation.step_time import StepTimes, growing_times

NUM_WORKERS = 4
BLOCK_SIZE = 16
STEP_MS = 6.0
GROWTH = 0.005
_CASES = ("agents", "unrelated", "paced", "death")
_COLUMNS = ("case", "mode", "requests", "hit_rate", "ttft_p50_ms", "ttft_p99_ms", "seconds", "handovers", "spread")

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured.

    Attributes:
        num_conversations: Of agents.
        num_blocks: Memory of a worker.
        gap_s: From the begin of one conversation to that of the next.
    """

    load: AgentLoad
    num_conversations: int
    num_blocks: int
    gap_s: float
    seed: int

    def case(self, name: str) -> Iterator[Row]:
        """Measure one case; a row for each way to serve it."""
        conversations = self.load.conversations(self.seed, self.num_conversations)
        if name == "unrelated":
            conversations = [_alone(each) for each in self.load.conversations(self.seed, 10 * self.num_conversations)]
        if name == "paced":
            conversations = self._that_fit(conversations)
        for mode in ("pull", "wait", "one worker"):
            if mode == "one worker" and name not in ("agents", "paced"):
                continue
            yield {"case": name, "mode": mode, **self._measure(name, mode, conversations)}

    def _measure(self, case: str, mode: str, conversations: Sequence[AgentConversation]) -> Row:
        fleet = self._fleet(mode)
        run = AgentRun(fleet, conversations)
        since = 0
        if case == "paced":
            run.one_by_one(left_out=1)
            since = len(run.jobs)
            run.one_by_one()
        else:
            if case == "death":
                half_s = 0.5 * len(conversations) * self.gap_s + 10.0
                fleet.call_later(half_s, fleet.workers[0].die)
                fleet.call_later(half_s + 10.0, fleet.workers[1].drain)
            run.together(self.gap_s / 10 if case == "unrelated" else self.gap_s)
        assert all(job.is_done for job in run.jobs), "a request was lost"
        used = [worker.stats.total_blocks - worker.num_blank_blocks for worker in fleet.workers]
        return {
            "requests": len(run.jobs),
            "hit_rate": round(run.hit_rate(since), 4),
            "ttft_p50_ms": run.ttft_ms(50),
            "ttft_p99_ms": run.ttft_ms(99),
            "seconds": round(fleet.now, 1),
            "handovers": sum(worker.waiting.num_granted for worker in fleet.workers),
            "spread": round(min(used) / max(used), 3),
        }

    def _that_fit(self, conversations: Sequence[AgentConversation]) -> list[AgentConversation]:
        """Return as many conversations as take up four fifths of all workers' memory, or all."""
        left = 0.8 * NUM_WORKERS * self.num_blocks * BLOCK_SIZE
        fitting = []
        for conversation in conversations:
            left -= sum(len(turn.added_ids) + turn.num_answered for turn in conversation.turns)
            if left < 0:
                break
            fitting.append(conversation)
        return fitting

    def _fleet(self, mode: str) -> VirtualFleet:
        """Make the workers; a single one has the memory, the slots and the speed of all."""
        times = NUM_WORKERS if mode == "one worker" else 1
        config = SchedulerConfig(BLOCK_SIZE, self.num_blocks * times, 16 * times, 2048, 1 << 17)
        num_workers = NUM_WORKERS // times
        step_times = StepTimes(growing_times(STEP_MS, GROWTH / times))
        return VirtualFleet(num_workers, config, step_times, is_affine=mode == "wait")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line names, print a table and record it."""
    parser = bench_parser("affinity", __doc__)
    add_list(parser, "--case", str, list(_CASES), "What to measure", _CASES)
    parser.add_argument("--conversations", type=int, default=40, help="of agents")
    parser.add_argument("--turns", type=int, default=AgentLoad().median_turns, help="of a conversation, in the median")
    parser.add_argument("--blocks", type=int, default=4096, help="of 16 tokens, memory of a worker")
    parser.add_argument("--gap-s", type=float, default=1.0, help="from one conversation to the next")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    load = AgentLoad(median_turns=options.turns)
    bench = Bench(load, options.conversations, options.blocks, options.gap_s, options.seed)
    shared = round(shared_share(load.conversations(options.seed, options.conversations)), 4)
    table = ResultTable("affinity", _COLUMNS)
    for name in options.case:
        for row in bench.case(name):
            table.add(row, shared_share=shared, num_blocks=options.blocks, median_turns=options.turns)


def _alone(conversation: AgentConversation) -> AgentConversation:
    """Return a conversation of one turn whose prompt no other one begins with."""
    first = conversation.turns[0]
    return AgentConversation(
        conversation.seed, [AgentTurn([conversation.seed, *first.added_ids], first.num_answered, 0.0)]
    )


if __name__ == "__main__":
    main()
