"""The engine with a runner that computes one step while the next is planned and submitted.

Steps that are given up for another client's first token, in virtual time and with the CPU's engine.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from threading import Timer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.first_tokens import SHARE, WAITING_SHARE
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.core.step_interrupt import StepGivenUpError, StepInterrupt
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.sampling import Sampling
from tests.gpu_worker.core.paged_oracle import reference_tokens
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.execution.engine_run import Outcome, make_runner, random_prompt, save_tiny_model
from tests.gpu_worker.runners import LateRunner, PacedRunner, make_scheduler


def reference(sequence: Sequence) -> tuple[list[int], str]:
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    return reference_tokens(sequence.salt, prompt, sequence.max_tokens, sequence.stop_ids, 23)


class Collected:
    """Every sequence's tokens and end; each token comes once, and nothing after the end."""

    def __init__(self) -> None:
        self.output: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}

    def take(self, events: list[SequenceEvent]) -> None:
        for event in events:
            name, output = event.sequence.id, self.output.setdefault(event.sequence.id, [])
            assert name not in self.finish
            assert event.num_tokens_before == len(output)
            output.extend(event.token_ids)
            if event.finish is not None:
                self.finish[name] = event.finish

    def run(self, engine: Engine) -> None:
        while engine.has_work():
            self.take(engine.step())


def test_next_step_is_submitted_before_the_result_of_the_last_is_asked_for() -> None:
    runner = LateRunner()
    engine = Engine(make_scheduler(), runner)
    engine.add(make_sequence(5, max_tokens=4, ignore_eos=True))
    Collected().run(engine)
    # fmt: off
    assert runner.log == [
        "submit 1", "submit 2", "result 1", "submit 3", "result 2", "submit 4", "result 3", "result 4",
    ]
    # fmt: on
    assert engine.num_steps_in_flight == 0


def test_result_that_raises_undoes_the_step_in_flight_too_and_costs_nobody_a_token() -> None:
    scheduler, runner = make_scheduler(), LateRunner(lost={2})
    engine = Engine(scheduler, runner)
    first = make_sequence(5, max_tokens=20, ignore_eos=True)
    other = make_sequence(40, max_tokens=20, arrival=1e9, ignore_eos=True)
    leaving, gone = make_sequence(5, max_tokens=20, ignore_eos=True), list[Sequence]()
    collected = Collected()
    engine.add(first)
    engine.add(leaving)
    collected.take(engine.step())
    assert engine.num_steps_in_flight == 1
    engine.add(other)
    engine.hand_over(leaving.id, gone.append)
    assert not gone
    collected.take(engine.step())
    assert gone == [leaving]
    assert isinstance(engine.last_error, RuntimeError)
    assert engine.num_steps_in_flight == 0
    # The step behind it is waited for: until it has landed, it writes to blocks that others may get.
    assert runner.log[-2:] == ["result 2", "result 3"]
    scheduler.check_integrity()
    collected.run(engine)
    for sequence in (first, other):
        assert (collected.output[sequence.id], collected.finish[sequence.id]) == reference(sequence)
    assert (engine.stats.num_failed_steps, engine.stats.is_fatal, engine.stats.free_blocks) == (1, False, 64)


def test_nobody_pauses_while_a_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler, LateRunner())
    engine.add(make_sequence(5, max_tokens=20, ignore_eos=True))
    monkeypatch.setattr(scheduler, "pause_s", lambda now: 5.0)
    assert engine.pause_s == 5.0
    engine.step()
    assert (engine.num_steps_in_flight, engine.pause_s) == (1, 0.0)


def test_refused_step_fails_after_those_before_it_and_nothing_is_planned_behind_it() -> None:
    runner = LateRunner(refused={2})
    engine = Engine(make_scheduler(max_num_seqs=2), runner)
    sequences = [make_sequence(5, max_tokens=9, ignore_eos=True) for _ in range(2)]
    collected = Collected()
    for sequence in sequences:
        engine.add(sequence)
    collected.take(engine.step())
    assert engine.last_error is None
    collected.take(engine.step())
    assert str(engine.last_error) == "out of memory"
    assert runner.log == ["submit 1", "submit 2", "result 1"]
    collected.take(engine.step())
    collected.take(engine.step())
    assert runner.log[3:] == ["submit 3", "result 3", "submit 4", "result 4"]
    collected.run(engine)
    for sequence in sequences:
        assert (collected.output[sequence.id], collected.finish[sequence.id]) == reference(sequence)


def test_rates_are_measured_between_landings() -> None:
    runner = PacedRunner(0.1)
    engine = Engine(make_scheduler(max_num_seqs=1), runner, clock=lambda: runner.now)
    engine.add(make_sequence(64, max_tokens=20))
    engine.step()
    assert engine.stats.prefill_rate == pytest.approx(320)
    while engine.has_work():
        engine.step()
        runner.now += 0.03
    assert engine.stats.prefill_rate == pytest.approx(320, rel=0.02)
    assert engine.stats.decode_rate == pytest.approx(10, rel=0.01)


@settings(max_examples=60)
@given(
    depth=st.integers(1, 3),
    num_blocks=st.sampled_from([12, 64]),
    refused=st.sets(st.integers(1, 30), max_size=3),
    lost=st.sets(st.integers(1, 30), max_size=3),
    lengths=st.lists(st.tuples(st.integers(1, 25), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=8),
    aborted=st.dictionaries(st.integers(0, 30), st.integers(0, 7), max_size=3),
    poisoned=st.sets(st.integers(0, 7), max_size=2),
)
def test_every_sequence_ends_once_with_the_tokens_of_a_contiguous_model(
    depth: int,
    num_blocks: int,
    refused: set[int],
    lost: set[int],
    lengths: list[tuple[int, int, int]],
    aborted: dict[int, int],
    poisoned: set[int],
) -> None:
    """`lengths`: prompt, output and round of arrival of each sequence; `aborted`: which one goes in which round.

    Only those sequences fail whose every step fails, and those that were computed alone when another step failed.
    """
    scheduler = make_scheduler(num_blocks=num_blocks)
    sequences = [make_sequence(prompt, max_tokens=output) for prompt, output, _ in lengths]
    poison = {sequence.id for index, sequence in enumerate(sequences) if index in poisoned}
    runner = LateRunner(depth, refused, lost, poison)
    engine = Engine(scheduler, runner)
    coming, collected, gone = list(zip(sequences, lengths, strict=True)), Collected(), set()
    for number in range(31):
        for sequence in [sequence for sequence, (_, _, arrival) in coming if arrival == number]:
            engine.add(sequence)
        if (index := aborted.get(number)) is not None and index < len(sequences):
            gone |= {s.id for s in [engine.abort(sequences[index].id)] if s is not None}
        collected.take(engine.step())
        assert engine.num_steps_in_flight < depth
        scheduler.check_integrity()
    collected.run(engine)
    scheduler.check_integrity()
    assert engine.stats.free_blocks == num_blocks
    failing = [plan for plan in runner.oracle.plans if plan.step in refused | lost]
    unlucky = {runner.oracle.names[plan.step][0] for plan in failing if len(plan.rows) == 1}
    for sequence in sequences:
        output, reason = reference(sequence)
        got, finish = collected.output.get(sequence.id, []), collected.finish.get(sequence.id)
        assert (finish is None) == (sequence.id in gone)
        if finish == "failed":
            assert sequence.id in poison | unlucky
        elif finish is not None:
            assert sequence.id not in poison
            assert (got, finish) == (output, reason)
        assert got == output[: len(got)]


FIXED_S, TOKEN_S, BUDGET, NUM_LONG = 0.006, 0.00003, 512, 1_100


class Beside:
    """One client's long prompts, of which some always wait, and short ones of another, in virtual time."""

    def __init__(self, *, can_give_up: bool = True) -> None:
        self.now, self._due, self._newcomer = 0.0, float("inf"), make_sequence(1)
        self._interrupt = StepInterrupt() if can_give_up else None
        self._runner = SimulatedRunner(0, range(10, 20))
        sizes = {"max_num_seqs": 32, "max_num_batched_tokens": BUDGET, "max_model_len": 4096}
        scheduler = Scheduler(SchedulerConfig(block_size=16, num_blocks=4_000, **sizes))
        self.engine = Engine(scheduler, self, lambda: self.now, self._interrupt)
        self.max_steps_in_flight = 1
        self.outputs: dict[Sequence, list[int]] = {}
        self.num_given_up = 0

    def submit(self, plan: StepPlan) -> PendingStep:
        """Compute a step, during which somebody may come."""
        if self._interrupt is not None:
            self._interrupt.begin(plan.step)
        done_at = self.now + FIXED_S + TOKEN_S * plan.num_tokens
        if self._due < done_at:
            self.now, self._due = max(self.now, self._due), float("inf")
            self.engine.make_way(self._newcomer)
            self.engine.add(self._newcomer)
        pending = self._runner.submit(plan)
        if self._interrupt is not None and self._interrupt.is_asked:
            self.num_given_up += 1
            raise StepGivenUpError
        self.now = done_at
        return pending

    def step(self) -> None:
        while self.engine.stats.waiting < 3:
            self._add(make_sequence(NUM_LONG, max_tokens=1, tenant="heavy"))
        for event in self.engine.step():
            self.outputs.setdefault(event.sequence, []).extend(event.token_ids)

    def _add(self, sequence: Sequence) -> None:
        self.engine.add(sequence)

    def ask(self, num_tokens: int, after_s: float, seed: int = 0) -> float:
        """Let a short prompt come after some time; return when its first token came after that."""
        self._newcomer = short = make_sequence(num_tokens, max_tokens=1, tenant="light", seed=seed)
        came_at = self._due = self.now + after_s
        while short not in self.outputs:
            self.step()
        return self.now - came_at

    @property
    def num_heavy(self) -> int:
        return sum(len(tokens) for sequence, tokens in self.outputs.items() if sequence.tenant == "heavy")


@pytest.mark.parametrize("num_tokens", [8, 64, 256])
def test_first_token_comes_within_one_and_a_half_times_what_it_takes_alone(num_tokens: int) -> None:
    beside, rng = Beside(), random.Random(0)
    waits_s = [beside.ask(num_tokens, rng.uniform(0.05, 0.25)) for _ in range(40)]
    assert statistics.median(waits_s[20:]) <= 1.5 * (FIXED_S + num_tokens * TOKEN_S)
    assert beside.num_given_up


def test_client_that_asks_all_the_time_costs_the_others_no_more_than_their_share() -> None:
    beside, alone, rng = Beside(), Beside(can_give_up=False), random.Random(1)
    for _ in range(150):
        beside.ask(2, rng.uniform(0.0, 0.02))
    while alone.now < beside.now:
        alone.step()
    assert beside.num_given_up
    assert beside.num_heavy >= (1 - SHARE) * (1 - WAITING_SHARE) * 0.9 * alone.num_heavy


def test_step_is_not_given_up_for_its_own_client_nor_for_batch_work() -> None:
    for options in ({"tenant": "heavy"}, {"tenant": "light", "lane": "batch"}):
        beside = Beside()
        for _ in range(20):
            beside.step()
        beside._newcomer = make_sequence(4, max_tokens=1, **options)
        beside._due = beside.now + 0.01
        for _ in range(5):
            beside.step()
        assert not beside.num_given_up


def test_step_is_not_given_up_soon_after_another_one_was() -> None:
    """Other clients pay for each out of the same share of their time."""
    beside = Beside()
    for seed in range(20):
        beside.ask(8 + 8 * seed, 0.03 + 0.007 * seed, seed)
    for tenant, num_tokens, after_s, num_steps, is_given_up in (
        ("first", 520, 0.012, 50, True),
        ("soon", 8, 0.016, 0, False),
        ("late", 8, 0.016, 50, True),
    ):
        for _ in range(num_steps):
            beside.step()
        before = beside.num_given_up
        beside._newcomer = make_sequence(num_tokens, max_tokens=1, tenant=tenant)
        beside._due = beside.now + after_s
        beside.step()
        assert (beside.num_given_up > before) is is_given_up


def test_late_request_to_end_a_step_does_not_take_back_one_for_a_later_step() -> None:
    """A decoder may have ended in between, and what it returned would count."""
    interrupt = StepInterrupt()
    interrupt.begin(7)
    interrupt.ask(7)
    interrupt.ask(6)
    with pytest.raises(StepGivenUpError):
        interrupt.check()
    # Steps are numbered anew.
    interrupt.clear()
    interrupt.begin(0)
    interrupt.check()
    interrupt.ask(0)
    with pytest.raises(StepGivenUpError):
        interrupt.check()


def test_tokens_are_those_of_steps_that_were_never_given_up() -> None:
    def tokens(*, can_give_up: bool) -> list[list[int]]:
        beside = Beside(can_give_up=can_give_up)
        streams = [make_sequence(40, max_tokens=200, tenant=f"stream {seed}", seed=seed) for seed in range(3)]
        for stream in streams:
            beside.engine.add(stream)
        for seed in range(40):
            beside.ask(8, 0.03 + 0.007 * seed, seed)
        assert beside.num_given_up > 5 or not can_give_up
        while any(len(beside.outputs[stream]) < 200 for stream in streams):
            beside.step()
        return [beside.outputs[stream] for stream in streams]

    assert tokens(can_give_up=True) == tokens(can_give_up=False)


class Disturbed:
    """A runner that is asked to end many of the steps that may be given up."""

    max_steps_in_flight = 1

    def __init__(self, runner: TorchModelRunner) -> None:
        self._runner, self._random = runner, random.Random(2)
        self.engine: Engine | None = None
        self.num_given_up = 0

    def submit(self, plan: StepPlan) -> PendingStep:
        assert self.engine is not None
        interrupt = self._runner.interrupt
        assert interrupt is not None
        asking = Timer(self._random.choice([0.0, 0.0, 0.0005, 0.001]), interrupt.ask, [plan.step])
        if self.engine._under_way is not None and self._random.random() < 0.7:
            asking.start()
            if not asking.interval:
                asking.join()
        try:
            return self._runner.submit(plan)
        except StepGivenUpError:
            self.num_given_up += 1
            raise


@pytest.mark.parametrize("form", ["fused", "layered"])
def test_real_steps_that_were_given_up_leave_nothing_behind(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "layered":
        monkeypatch.setattr("gpu_worker.models.decoder._fusing_library", lambda *_: None)
    save_tiny_model(tmp_path)
    runner = make_runner(tmp_path, max_num_seqs=6)
    outputs = []
    for disturbed in (None, Disturbed(runner)):
        config = SchedulerConfig(
            block_size=4, num_blocks=400, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=160
        )
        engine = Engine(Scheduler(config), disturbed or runner, interrupt=runner.interrupt)
        if disturbed is not None:
            disturbed.engine = engine
        for seed in range(8):
            sampling = Sampling(temperature=seed % 2, seed=seed, logprobs=1)
            engine.add(
                Sequence(f"{seed}", random_prompt(30 + 9 * seed, seed % 4), 30 + 9 * seed, sampling, max_tokens=12)
            )
        outcome = Outcome()
        while engine.has_work():
            for event in engine.step():
                outcome.add(event)
        assert engine.stats.num_failed_steps == 0
        outputs.append((outcome.tokens, outcome.logprobs))
        assert disturbed is None or disturbed.num_given_up > 2
        runner.clear()
    assert outputs[0] == outputs[1]


def test_images_stay_encoded_where_a_step_is_given_up() -> None:
    forgotten: list[bool] = []
    beside = Beside()
    beside.engine.scheduler._planner.encoder.reset = lambda: forgotten.append(True)  # type: ignore[method-assign]
    for seed in range(20):
        beside.ask(8, 0.06, seed)
    assert beside.num_given_up
    assert not forgotten


@pytest.mark.parametrize("restarts", [True, False])
def test_step_that_nobody_may_give_up_is_computed_again(*, restarts: bool) -> None:
    beside = Beside()
    assert beside._interrupt is not None
    beside._interrupt.ask(2)
    if restarts:
        beside.engine.restart()
    beside.engine.add(make_sequence(8, max_tokens=4))
    tokens: list[int] = []
    while beside.engine.has_work():
        tokens += [token for event in beside.engine.step() for token in event.token_ids]
    assert len(tokens) == 4
    # What was asked of steps before a restart is forgotten.
    assert beside.engine.stats.num_failed_steps == beside.num_given_up == (0 if restarts else 1)
