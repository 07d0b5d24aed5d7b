"""Runs the engine over a group of ranks that are processes, as a worker does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.remote import Remote
from gpu_worker.execution.ranks.runner import build_group_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.execution.engine_run import Outcome, answer, scheduler_config

DEFAULTS = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 6, "num_threads": 1, "max_draft_tokens": 4}


class Run:
    """A runner, of one process or several, and what it takes to answer sequences with it."""

    num_stages = 1

    def __init__(self, own: TorchModelRunner, runner: ModelRunner, constraints: SharedConstraints) -> None:
        self.own = own
        self.runner = runner
        self._constraints = constraints

    def engine(self, num_blocks: int | None = None, proposer: Proposer | None = None) -> Engine:
        own = self.own
        own.clear()
        own.verify_drafts_of(proposer)
        has_states = own.model_config.has_states
        state = state_config(own.num_state_slots, own.block_size) if has_states else None
        changes = {"num_blocks": num_blocks or own.num_blocks, "num_parts": own.num_parts, "state": state}
        changes["num_groups"] = self.num_stages
        config = scheduler_config(own, own.step_limits.max_num_seqs, 32, headroom_tokens=0, **changes)
        speculation = None if proposer is None else Speculation(FixedDepth(4))
        return Engine(Scheduler(config, speculation, self._constraints), self.runner)

    def answer(self, sequences: list[Sequence], **options: Any) -> Outcome:
        """Answer sequences that come one by one."""
        return answer(self.engine(**options), sequences, arrivals_per_step=1)


@contextmanager
def started(
    directory: Path, size: int, remote: Remote | None = None, **settings: Any
) -> Iterator[tuple[Run, RankGroup | None]]:
    """Build the runner of a model that is divided among `size` processes, this one and those of `remote` included."""
    config = RunnerConfig(directory, **{**DEFAULTS, **settings}, tensor_parallel_size=size)
    constraints = SharedConstraints()
    if config.num_ranks == 1:
        own = build_runner(config, constraints=constraints)
        yield Run(own, own, constraints), None
        return
    group = RankGroup(config, "warning", remote=remote)
    try:
        runner = build_group_runner(config, group, StartUp(), constraints)
        run = Run(runner.own, runner, constraints)
        run.num_stages = config.pipeline_parallel_size
        yield run, group
    finally:
        group.close()
