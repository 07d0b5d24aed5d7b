import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_worker.core.model_runner import BrokenRunnerError, InterruptedRunnerError, ModelRunner
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import CompletedStep, SequenceEvent, StepResult
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.engine_thread import EngineStoppedError, EngineThread, StepOutcome
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.errors import PromptTooLongError
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.runners import (
    BrokenRunner,
    GatedLateRunner,
    GatedRunner,
    LateRunner,
    PoisonedRunner,
    make_scheduler,
)
from tests.waiting import wait_for


class Running:
    """An engine thread and the outcomes that it delivered."""

    def __init__(self, runner: ModelRunner, max_num_seqs: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        self.outcomes: queue.SimpleQueue[StepOutcome] = queue.SimpleQueue()
        self.thread = EngineThread(Engine(make_scheduler(max_num_seqs), runner, clock))

    def outcome(self) -> StepOutcome:
        return self.outcomes.get(timeout=10)

    def events_until_finished(self, count: int) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        while sum(event.finish is not None for event in events) < count:
            events += self.outcome().events
        return events


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts engine threads, and stops them after the test."""
    started: list[Running] = []

    def start_one(runner: ModelRunner, **options: Any) -> Running:
        running = Running(runner, **options)
        running.thread.start(running.outcomes.put)
        started.append(running)
        return running

    yield start_one
    for running in started:
        if isinstance(runner := running.thread._engine._runner, GatedRunner | GatedLateRunner):
            runner.gate.release(1000)
        running.thread.stop()


Start = Callable[..., Running]


def test_added_sequences_are_delivered_step_by_step(start: Start) -> None:
    running = start(SimulatedRunner(0, range(10, 20)))
    sequences = [make_sequence(5, max_tokens=7, seed=seed) for seed in range(10)]
    for sequence in sequences:
        running.thread.add(sequence)
    events = running.events_until_finished(10)
    for sequence in sequences:
        mine = [event for event in events if event.sequence is sequence]
        assert [token for event in mine for token in event.token_ids] == sequence.token_ids[5:]
        assert mine[-1].finish == "length"


def test_step_numbers_grow_by_one(start: Start) -> None:
    running = start(SimulatedRunner(0, range(10, 20)))
    running.thread.add(make_sequence(5, max_tokens=5))
    assert [running.outcome().step for _ in range(5)] == [1, 2, 3, 4, 5]


def test_idle_thread_uses_no_cpu_and_makes_no_steps(start: Start) -> None:
    running = start(SimulatedRunner(0, range(10, 20)))
    running.thread.add(make_sequence(5, max_tokens=1))
    running.events_until_finished(1)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1
    assert running.outcomes.empty()
    assert running.thread.stats.step == 1


def test_batch_work_waits_for_a_moment_after_people_but_they_do_not(start: Start) -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 1e-6  # a step takes some time
        return now[0]

    running = start(SimulatedRunner(0, range(10, 20)), clock=clock)
    running.thread.add(make_sequence(5, max_tokens=2))
    running.events_until_finished(1)
    running.thread.add(background := make_sequence(5, max_tokens=2, lane="batch"))
    with pytest.raises(queue.Empty):
        running.outcomes.get(timeout=0.2)
    running.thread.add(person := make_sequence(5, max_tokens=1))
    assert person in [event.sequence for event in running.outcome().events]
    now[0] += 1.0
    wait_for(lambda: background.num_output_tokens == 2, 10)


def test_commands_during_a_step_take_effect_after_it(start: Start) -> None:
    runner = GatedRunner()
    running = start(runner)
    first, second = make_sequence(5, max_tokens=50), make_sequence(5, max_tokens=50)
    running.thread.add(first)
    assert runner.entered.acquire(timeout=10)
    running.thread.add(second)
    running.thread.abort(first.id)
    called: list[int] = []
    running.thread.call(lambda: called.append(running.thread.stats.step))
    runner.gate.release()
    assert [event.sequence for event in running.outcome().events] == [first]
    runner.gate.release()
    assert [event.sequence for event in running.outcome().events] == [second]
    assert called == [1]


def test_abort_frees_blocks_without_another_step(start: Start) -> None:
    runner = GatedRunner()
    running = start(runner)
    running.thread.add(sequence := make_sequence(20, max_tokens=50))
    assert runner.entered.acquire(timeout=10)
    running.thread.abort(sequence.id)
    runner.gate.release()
    assert running.outcome().stats.free_blocks < 64
    wait_for(lambda: running.thread.stats.free_blocks == 64, 10)
    assert running.outcomes.empty()


def test_prompt_too_long_is_refused_in_the_callers_thread(start: Start) -> None:
    running = start(SimulatedRunner(0, range(10, 20)))
    with pytest.raises(PromptTooLongError):
        running.thread.add(make_sequence(200))


def test_second_sequence_with_an_id_in_use_fails_and_the_first_goes_on(start: Start) -> None:
    runner = GatedRunner()
    running = start(runner)
    first, second = make_sequence(5, id="same", max_tokens=2), make_sequence(5, id="same")
    running.thread.add(first)
    running.thread.add(second)
    runner.gate.release(10)
    finishes = {id(e.sequence): e.finish for e in running.events_until_finished(2) if e.finish}
    assert finishes == {id(second): "failed", id(first): "length"}


def test_runner_exception_is_delivered_and_the_thread_goes_on(start: Start) -> None:
    poisoned = make_sequence(5)
    running = start(PoisonedRunner({poisoned.id}))
    running.thread.add(poisoned)
    assert isinstance(running.outcome().error, RuntimeError)
    outcome = running.outcome()
    assert [event.finish for event in outcome.events] == ["failed"]
    assert isinstance(outcome.error, RuntimeError)
    assert not outcome.stats.is_fatal
    running.thread.add(make_sequence(5, max_tokens=2))
    assert running.events_until_finished(1)[-1].finish == "length"


def test_sequence_that_fails_is_named_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    running = start(PoisonedRunner({"poison"}))
    for name in ("poison", "neighbour"):
        sequence = make_sequence(5, id=name, max_tokens=2)
        sequence.trace = f"req_{name}"
        running.thread.add(sequence)
    running.events_until_finished(2)
    named = [(r.__dict__["id"], r.__dict__["request_id"]) for r in caplog.records if r.message == "sequence failed"]
    assert named == [("poison", "req_poison")]


def test_runner_that_computes_nothing_any_more_ends_the_engine_without_events(start: Start) -> None:
    running = start(BrokenRunner())
    running.thread.add(make_sequence(5))
    assert running.outcome().events == []
    outcome = running.outcome()
    assert (outcome.events, outcome.stats.is_fatal) == ([], True)
    assert isinstance(outcome.error, BrokenRunnerError)
    assert running.thread.stats.is_fatal


@pytest.mark.parametrize("is_logged", [False, True])
def test_end_of_the_engine_is_one_error_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture, *, is_logged: bool
) -> None:
    class EndedRunner:
        max_steps_in_flight = 1

        def submit(self, plan: StepPlan) -> Any:
            raise BrokenRunnerError(RuntimeError("rank 1 is gone"), is_logged=is_logged)

    running = start(EndedRunner())
    running.thread.add(make_sequence(5))
    assert running.outcome().stats.is_fatal
    assert [record.message for record in caplog.records] == ([] if is_logged else ["the engine broke down"])


def test_runner_that_recovers_computes_what_comes_later(start: Start) -> None:
    class InterruptedOnce(SimulatedRunner):
        is_lost = True

        def submit(self, plan: StepPlan) -> CompletedStep:
            if self.is_lost:
                raise InterruptedRunnerError(RuntimeError("rank 1 is gone"), self.recover)
            return super().submit(plan)

        def recover(self) -> None:
            self.is_lost = False

    runner = InterruptedOnce(0.0, range(5, 9))
    running = start(runner)
    running.thread.add(make_sequence(5, id="lost"))
    wait_for(lambda: not runner.is_lost)
    running.thread.add(make_sequence(5, id="later", max_tokens=2))
    events = running.events_until_finished(1)
    assert {event.sequence.id for event in events} == {"later"}
    assert running.thread.stats.running == 0
    assert running.thread.is_alive


def test_error_in_the_engine_itself_ends_it_and_leaves_everything_to_others(start: Start) -> None:
    class LyingRunner:
        max_steps_in_flight = 1

        def submit(self, plan: StepPlan) -> CompletedStep:
            assert are_added.wait(10)
            return CompletedStep(StepResult(plan.step + 1, [None] * len(plan.rows)))  # type: ignore[list-item]

    are_added = threading.Event()
    running = start(LyingRunner(), max_num_seqs=1)
    running.thread.add(make_sequence(5))
    running.thread.add(make_sequence(5))
    are_added.set()
    outcome = running.outcome()
    assert (outcome.events, outcome.stats.is_fatal) == ([], True)
    wait_for(lambda: not running.thread.is_alive, 10)
    with pytest.raises(EngineStoppedError):
        running.thread.add(make_sequence(5))


def test_stop_returns_what_did_not_finish_and_makes_no_event_for_it(start: Start) -> None:
    runner = GatedRunner()
    running = start(runner, max_num_seqs=1)
    active, waiting = make_sequence(5, max_tokens=50), make_sequence(5)
    running.thread.add(active)
    running.thread.add(waiting)
    assert runner.entered.acquire(timeout=10)
    runner.gate.release()
    assert running.thread.stop() == [active, waiting]
    assert not running.thread.is_alive
    assert running.thread.stats.free_blocks == 64
    with pytest.raises(EngineStoppedError):
        running.thread.add(make_sequence(5))


def test_sequence_that_a_draining_thread_refuses_is_not_run(start: Start) -> None:
    runner = GatedRunner()
    running = start(runner)
    running.thread.add(active := make_sequence(5, max_tokens=2))
    assert runner.entered.acquire(timeout=10)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(running.thread.stop, 10)
        wait_for(lambda: running.thread._is_closed, 10)
        with pytest.raises(EngineStoppedError):
            running.thread.add(make_sequence(5, max_tokens=2))
        runner.gate.release(1000)
        assert stopping.result(10) == []
    events = [event for _ in range(running.outcomes.qsize()) for event in running.outcome().events]
    assert [event.sequence for event in events] == [active, active]


@pytest.mark.parametrize("make_runner", [lambda: SimulatedRunner(1, range(10, 20)), LateRunner])
def test_draining_stop_finishes_the_work(start: Start, make_runner: Callable[[], ModelRunner]) -> None:
    running = start(make_runner())
    for _ in range(6):
        running.thread.add(make_sequence(5, max_tokens=10, ignore_eos=True))
    assert running.thread.stop(drain_s=10) == []
    assert [event.finish for event in running.events_until_finished(6) if event.finish] == ["length"] * 6
    assert running.thread.stats.free_blocks == 64


def test_draining_stop_gives_up_in_time(start: Start) -> None:
    running = start(SimulatedRunner(20, range(10, 20)))
    running.thread.add(sequence := make_sequence(5, max_tokens=190))
    # It would have ended after four seconds.
    assert running.thread.stop(drain_s=0.05) == [sequence]
    assert sequence.num_output_tokens < 100


def test_stopping_a_thread_that_never_started_returns_at_once() -> None:
    assert Running(SimulatedRunner(0, range(10, 20))).thread.stop() == []


def test_sequence_that_slips_in_while_the_engine_stops_is_returned_as_unfinished() -> None:
    running = Running(SimulatedRunner(0, range(10, 20)))
    thread, sequence = running.thread, make_sequence(5)
    thread._inbox.put(lambda: thread._begin_stop(0.0))
    thread.add(sequence)
    thread.start(running.outcomes.put)
    assert thread.stop() == [sequence]


def test_stop_lands_and_delivers_the_steps_in_flight(start: Start) -> None:
    runner = GatedLateRunner()
    running = start(runner, max_num_seqs=1)
    active, waiting = make_sequence(5, max_tokens=50, ignore_eos=True), make_sequence(5)
    running.thread.add(active)
    running.thread.add(waiting)
    assert runner.entered.acquire(timeout=10)
    running.thread._inbox.put(lambda: running.thread._begin_stop(0.0))
    runner.gate.release(2)
    assert running.thread.stop() == [active, waiting]
    tokens = [token for _ in range(2) for event in running.outcome().events for token in event.token_ids]
    assert tokens == active.token_ids[5:]
    assert len(tokens) == 2
    assert running.outcomes.empty()
    assert runner.log[-2:] == ["result 1", "result 2"]
    assert running.thread.stats.free_blocks == 64


def test_sequence_that_ends_in_a_step_that_stop_lands_is_finished(start: Start) -> None:
    runner = GatedLateRunner()
    running = start(runner)
    running.thread.add(make_sequence(5, max_tokens=2, ignore_eos=True))
    assert runner.entered.acquire(timeout=10)
    running.thread._inbox.put(lambda: running.thread._begin_stop(0.0))
    runner.gate.release(2)
    assert running.thread.stop() == []
    assert [event.finish for event in running.events_until_finished(1)] == [None, "length"]


def test_abort_frees_blocks_once_the_step_in_flight_has_landed(start: Start) -> None:
    runner = GatedLateRunner()
    running = start(runner)
    running.thread.add(sequence := make_sequence(20, max_tokens=50, ignore_eos=True))
    assert runner.entered.acquire(timeout=10)
    running.thread.abort(sequence.id)
    runner.gate.release()
    assert [event.sequence for event in running.outcome().events] == [sequence]
    assert runner.entered.acquire(timeout=10)
    assert running.thread.stats.free_blocks < 64
    runner.gate.release()
    assert (running.outcome().events, running.thread.stats.free_blocks) == ([], 64)


def test_last_event_of_a_sequence_that_was_complete_is_delivered_although_the_engine_stops() -> None:
    running = Running(SimulatedRunner(0, range(10, 20)))
    running.thread.add(make_sequence(5, emitted=[11], max_tokens=1))
    running.thread._inbox.put(lambda: running.thread._begin_stop(0.0))
    running.thread.start(running.outcomes.put)
    assert running.thread.stop() == []
    assert [event.finish for event in running.outcome().events] == ["length"]
