"""A pipeline of stages is kept full by plans of groups of the running sequences."""

from __future__ import annotations

import pytest

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.sampling import Sampling
from tests.clock import Clock

STEP_MS = 10.0


class Pipeline:
    """An engine over stages, on a clock of its own, and how long the stages computed."""

    def __init__(self, num_stages: int, *, num_blocks: int = 4000) -> None:
        self.clock = Clock()
        self.runner = SimulatedRunner(STEP_MS, range(10, 99), self.clock, self.clock.sleep, num_stages=num_stages)
        config = SchedulerConfig(
            block_size=16,
            num_blocks=num_blocks,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            max_model_len=2000,
            headroom_tokens=0,
            num_groups=num_stages,
        )
        self.engine = Engine(Scheduler(config), self.runner, self.clock)
        self.busy_s = 0.0
        self.tokens: dict[str, list[int]] = {}
        submit = self.runner.submit

        def submit_and_count(plan):  # type: ignore[no-untyped-def]
            self.busy_s += STEP_MS / 1000 * (1 + 0.005 * (plan.num_tokens - 1)) / num_stages
            return submit(plan)

        self.runner.submit = submit_and_count  # type: ignore[method-assign]

    def add(self, number: int, prompt: int, new: int) -> None:
        ids = [1 + (number + place) % 90 for place in range(prompt)]
        sampling = Sampling(seed=number)
        self.engine.add(Sequence(f"s{number}", ids, prompt, sampling, max_tokens=new, arrival=number))

    def run(self) -> float:
        """Answer all, and return the share of the time in which a stage had nothing to do."""
        began = self.clock.now
        while self.engine.has_work():
            for event in self.engine.step():
                self.take(event)
        return 1 - self.busy_s / (self.clock.now - began)

    def take(self, event: SequenceEvent) -> None:
        assert event.finish in (None, "length")
        self.tokens.setdefault(event.sequence.id, []).extend(event.token_ids)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("prompt", [10, 700])
def test_stages_wait_a_tenth_of_the_time_at_most(num_stages: int, prompt: int) -> None:
    pipeline = Pipeline(num_stages)
    for number in range(4 * num_stages):
        pipeline.add(number, prompt + 7 * number, 60)
    assert pipeline.run() <= 0.10
    assert all(len(tokens) == 60 for tokens in pipeline.tokens.values())
    assert len(pipeline.tokens) == 4 * num_stages


def test_prompts_that_come_while_others_decode_leave_the_stages_full() -> None:
    pipeline = Pipeline(2)
    for number in range(8):
        pipeline.add(number, 20, 150)
    began = pipeline.clock.now
    for number in range(8, 24):
        for _ in range(12):
            for event in pipeline.engine.step():
                pipeline.take(event)
        pipeline.add(number, 300, 40)
    pipeline.run()
    assert 1 - pipeline.busy_s / (pipeline.clock.now - began) <= 0.10


def test_a_single_sequence_leaves_stages_waiting_by_turns() -> None:
    """The measure itself: of two stages, one computes at a time."""
    pipeline = Pipeline(2)
    pipeline.add(0, 10, 60)
    assert 0.45 < pipeline.run() < 0.51


@pytest.mark.parametrize("num_blocks", [4000, 40])
def test_tokens_are_those_of_one_stage_also_with_preemptions(num_blocks: int) -> None:
    found = []
    for num_stages in (1, 3):
        pipeline = Pipeline(num_stages, num_blocks=num_blocks)
        for number in range(12):
            pipeline.add(number, 10 + 13 * number, 50)
        pipeline.run()
        found.append(pipeline.tokens)
        assert (pipeline.engine.stats.num_preemptions > 0) == (num_blocks < 100)
    assert found[0] == found[1]
