"""What a batch backlog costs the people beside it, in simulated time.

A pipeline of stages is kept full by plans of groups of the running sequences.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.messages import Lane
from shared.sampling import Sampling
from tests.clock import Clock

NUM_TOKENS = 40
# Milliseconds of a step of one sequence, and the share of it that every other sequence and prompt token adds.
CPU = (1.0, 0.2)
GPU = (6.0, 0.005)


@dataclass
class Visit:
    """A request of a person, and what they saw of it in seconds."""

    came: float
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    last_token: float = 0.0


class Runner(SimulatedRunner):
    """Takes `noise` times as long as is due."""

    noise: Callable[[], float] = staticmethod(lambda: 1.0)

    def _wait(self, duration_s: float) -> None:
        super()._wait(duration_s * self.noise())


class House:
    """An engine in simulated time, a backlog that never ends, and people who ask again after a while."""

    def __init__(self, cost: tuple[float, float], *, has_backlog: bool) -> None:
        self.clock = Clock(0.0)
        step_ms, growth = cost
        self.runner = Runner(step_ms, [7], self.clock, self.clock.sleep, growth=growth)
        config = SchedulerConfig(
            block_size=16, num_blocks=20_000, max_num_seqs=256, max_num_batched_tokens=512, max_model_len=2048
        )
        self.engine = Engine(Scheduler(config), self.runner, self.clock)
        self._has_backlog = has_backlog
        self._num_added = 0
        self.num_batch_tokens = 0

    def serve(
        self, *, num_people: int, num_visits: int, pause_s: tuple[float, float], first_at: float | None = None
    ) -> list[Visit]:
        """Send interactive requests until a number have ended; return the timing of each.

        They come after quiet seconds, or at `first_at`.
        """
        rng = random.Random(11)
        visits: dict[str, Visit] = {}
        coming = [13.0 + rng.random() if first_at is None else first_at for _ in range(num_people)]
        num_ended = 0
        while num_ended < num_visits:
            if self._has_backlog:
                self._fill_backlog()
            while coming and coming[0] <= self.clock.now:
                came = heapq.heappop(coming)
                visits[self._add("interactive", came, rng.randrange(4, 24))] = Visit(came)
            self._step_or_wait(coming[0] if coming else math.inf, visits)
            for key in [key for key, visit in visits.items() if len(visit.gaps_s) == NUM_TOKENS - 1 and key[0] == "p"]:
                visits[f"ended {key}"] = visits.pop(key)
                num_ended += 1
                heapq.heappush(coming, self.clock.now + rng.uniform(*pause_s))
        return [visit for key, visit in visits.items() if key[0] == "e"]

    def idle_until(self, next_visit: float) -> None:
        """Compute batch work, of which there is always more, until an interactive request comes."""
        self._fill_backlog()
        self._step_or_wait(next_visit, {})

    def _step_or_wait(self, next_visit: float, visits: dict[str, Visit]) -> None:
        engine, clock = self.engine, self.clock
        if not engine.has_work():
            clock.now = next_visit
            return
        if engine.pause_s:
            clock.now = min(clock.now + engine.pause_s, next_visit)
            return
        for event in engine.step():
            if event.sequence.lane == "batch":
                self.num_batch_tokens += len(event.token_ids)
            elif event.token_ids:
                visit = visits[event.sequence.id]
                if visit.first_token_s:
                    visit.gaps_s.append(clock.now - visit.last_token)
                else:
                    visit.first_token_s = clock.now - visit.came
                visit.last_token = clock.now

    def _fill_backlog(self) -> None:
        stats = self.engine.stats
        for _ in range(stats.running_batch + stats.waiting_batch, stats.max_batch_seqs + 2):
            self._add("batch", self.clock.now, 20)

    def _add(self, lane: Lane, arrival: float, num_prompt_tokens: int) -> str:
        self._num_added += 1
        key = f"{'p' if lane == 'interactive' else 'b'}{self._num_added}"
        # No two prompts share a block.
        prompt = [self._num_added] * num_prompt_tokens
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        self.engine.add(Sequence(key, prompt, len(prompt), sampling, NUM_TOKENS, lane=lane, arrival=arrival))
        return key


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


@pytest.mark.parametrize(
    ("cost", "num_people", "pause_s"),
    [
        pytest.param(CPU, 1, (0.0, 0.1), id="one who asks again at once, CPU"),
        pytest.param(CPU, 8, (0.02, 0.1), id="eight, CPU", marks=pytest.mark.slow),
        pytest.param(GPU, 1, (0.02, 0.3), id="one, GPU", marks=pytest.mark.slow),
        pytest.param(GPU, 8, (0.02, 0.3), id="eight, GPU", marks=pytest.mark.slow),
    ],
)
def test_backlog_does_not_slow_people_down(
    cost: tuple[float, float], num_people: int, pause_s: tuple[float, float]
) -> None:
    seen = {}
    for has_backlog in (False, True):
        house = House(cost, has_backlog=has_backlog)
        visits = house.serve(num_people=num_people, num_visits=200, pause_s=pause_s)
        # Who comes first after ten quiet seconds meets the machine at full speed.
        visits = sorted(visits, key=lambda visit: visit.came)[num_people:]
        gaps = [gap for visit in visits for gap in visit.gaps_s]
        first = [visit.first_token_s for visit in visits]
        seen[has_backlog] = [percentile(values, share) for values in (first, gaps) for share in (0.5, 0.99)]
    assert house.num_batch_tokens > 3_000
    ratios = [beside / alone for alone, beside in zip(seen[False], seen[True], strict=True)]
    assert max(ratios) <= 1.1, ratios


def test_batch_work_goes_on_between_people_who_come_now_and_then() -> None:
    house = House(CPU, has_backlog=True)
    house.serve(num_people=1, num_visits=3, pause_s=(4.0, 4.0))
    num_before, began = house.num_batch_tokens, house.clock.now
    visits = house.serve(num_people=1, num_visits=5, pause_s=(4.0, 4.0))
    assert house.num_batch_tokens - num_before > 100 * (house.clock.now - began)
    assert visits


# What another sequence or prompt token adds, as a share of a step; and of what would fit, the part that must be done.
@pytest.mark.parametrize(
    ("cost", "least_share"),
    [
        pytest.param((6.0, 0.005), 0.6, id="GPU"),
        pytest.param((30.0, 0.005), 0.6, id="slow GPU"),
        pytest.param((1.0, 0.02), 0.6, id="small model on a CPU"),
        pytest.param((1.0, 0.05), 0.6, id="one sequence fits just"),
        pytest.param(CPU, 0.6, id="none fits but in long steps"),
    ],
)
def test_batch_work_beside_a_person_is_most_of_what_fits_into_the_slowdown(
    cost: tuple[float, float], least_share: float
) -> None:
    house, rng = House(cost, has_backlog=True), random.Random(3)
    house.runner.noise = lambda: rng.lognormvariate(0, 0.05)
    visits = house.serve(num_people=1, num_visits=1, pause_s=(0.0, 0.0), first_at=0.0)
    while house.clock.now < 2.0:
        visits += house.serve(num_people=1, num_visits=1, pause_s=(0.0, 0.0), first_at=house.clock.now)
    num_before, began = house.num_batch_tokens, house.clock.now
    visits = []
    while house.clock.now < began + 5.0:
        visits += house.serve(num_people=1, num_visits=1, pause_s=(0.0, 0.0), first_at=house.clock.now)
    # Each token of an answer takes a share of a step, and so does each of the prompt, which has half as many.
    slowdown, (step_ms, growth) = 0.05, cost
    ideal = slowdown / (1 + slowdown) / (step_ms / 1000 * growth * 1.5)
    assert (house.num_batch_tokens - num_before) / (house.clock.now - began) >= least_share * ideal
    gaps = [gap for visit in visits for gap in visit.gaps_s]
    assert sum(gaps) / len(gaps) <= 1.1 * step_ms / 1000


def test_batch_work_that_costs_nothing_is_not_held_back_for_long() -> None:
    house = House((6.0, 0.0), has_backlog=True)
    while house.clock.now < 2.0:
        house.serve(num_people=1, num_visits=1, pause_s=(0.0, 0.0), first_at=house.clock.now)
    num_before, began = house.num_batch_tokens, house.clock.now
    while house.clock.now < began + 2.0:
        house.serve(num_people=1, num_visits=1, pause_s=(0.0, 0.0), first_at=house.clock.now)
    # 20 jobs of 100 tokens in a second, with room to spare.
    assert (house.num_batch_tokens - num_before) / (house.clock.now - began) > 5_000


def test_fleet_is_at_full_speed_when_the_last_person_has_left() -> None:
    house = House(GPU, has_backlog=True)
    house.serve(num_people=1, num_visits=20, pause_s=(0.0, 0.1))
    per_second = []
    for _ in range(6):
        num_before, ends_at = house.num_batch_tokens, house.clock.now + 1.0
        while house.clock.now < ends_at:
            house.idle_until(ends_at)
        per_second.append(house.num_batch_tokens - num_before)
    assert per_second[0] > 0.5 * per_second[-1]
    assert min(per_second[1:]) > 0.8 * per_second[-1]


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
        for _ in range(6):
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
