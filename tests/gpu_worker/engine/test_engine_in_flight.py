"""The engine with a runner that computes one step while the next is planned and submitted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine
from tests.gpu_worker.core.paged_oracle import reference_tokens
from tests.gpu_worker.core.sequences import make_sequence
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
