"""Single flight under random joins, leaves and deltas: all get the whole text, and nothing is done twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.cache.single_flight import SharedGeneration, SingleFlight
from gateway.errors import ApiError
from shared.messages import Delta, Finish, Usage

KEY = b"key"
NUM_SEQUENCES = 2
NUM_TOKENS = 6


class TextSink:
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.num_endings = 0
        self.error: ApiError | None = None

    def deliver(self, delta: Delta) -> None:
        assert self.num_endings == 0
        assert delta.seq == self.num_tokens
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        self.num_endings += delta.finish is not None

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.num_endings += 1


def delta(position: int) -> Delta:
    finish = Finish("length", Usage(1, NUM_TOKENS)) if position == NUM_TOKENS - 1 else None
    return Delta("r", 0, position, (position,), f"{position} ", finish)


class SingleFlightMachine(RuleBasedStateMachine):
    """One key; generations come and go on it."""

    def __init__(self) -> None:
        super().__init__()
        self.flights = SingleFlight()
        self.generation: SharedGeneration | None = None
        self.positions = [0] * NUM_SEQUENCES
        self.members: list[list[TextSink]] = []
        self.left: list[tuple[list[TextSink], list[str]]] = []
        self.num_started = 0
        self.num_cancelled = 0
        self.num_completed = 0

    @rule()
    def join(self) -> None:
        found = self.flights.find(KEY)
        assert (found is not None) == (self.generation is not None)
        if found is None:
            found = self.flights.lead(KEY, NUM_SEQUENCES, self._completed)
            found.dispatched(self._cancelled)
            self.generation = found
            self.positions = [0] * NUM_SEQUENCES
            self.num_started += 1
        sinks = [TextSink() for _ in range(NUM_SEQUENCES)]
        self.members.append(sinks)
        found.join(sinks)

    @precondition(lambda self: self.members and self.generation)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        assert self.generation is not None
        sinks = self.members.pop(which % len(self.members))
        before, generation = self.num_cancelled, self.generation
        generation.leave(sinks)
        generation.leave(sinks)
        self.left.append((sinks, [sink.text for sink in sinks]))
        assert self.num_cancelled - before == (not self.members)

    @precondition(lambda self: self.generation)
    @rule(which=st.integers(0, NUM_SEQUENCES - 1))
    def generate(self, which: int) -> None:
        assert self.generation is not None
        position = self.positions[which]
        if position < NUM_TOKENS:
            self.positions[which] = position + 1
            self.generation.sequences[which].deliver(delta(position))

    @precondition(lambda self: self.generation)
    @rule()
    def generate_the_rest(self) -> None:
        assert self.generation is not None
        generation, before = self.generation, self.num_completed
        for which, start in enumerate(self.positions):
            for position in range(start, NUM_TOKENS):
                self.positions[which] = position + 1
                generation.sequences[which].deliver(delta(position))
        assert self.num_completed - before == 1
        assert self.flights.find(KEY) is None

    @precondition(lambda self: self.generation)
    @rule()
    def fail(self) -> None:
        assert self.generation is not None
        members, self.members = self.members, []
        generation = self.generation
        generation.fail(ApiError(500, "broken"))
        assert self.flights.find(KEY) is None
        for sinks in members:
            assert all(sink.error is not None or sink.num_tokens == NUM_TOKENS for sink in sinks)
            generation.leave(sinks)
        self.generation = None

    @precondition(lambda self: self.generation)
    @rule(which=st.integers(0, NUM_SEQUENCES - 1))
    def one_sequence_fails(self, which: int) -> None:
        assert self.generation is not None
        if self.positions[which] == NUM_TOKENS:
            return
        self.generation.sequences[which].fail(ApiError(500, "broken"))
        # Its members are still there, but a request that comes now must get a generation that can succeed.
        assert self.flights.find(KEY) is None
        failed, self.generation, members = self.generation, None, self.members
        self.members, before = [], self.num_cancelled
        for sinks in members:
            failed.leave(sinks)
        assert self.num_cancelled - before == bool(members)

    @invariant()
    def all_have_heard_everything(self) -> None:
        for sinks in self.members:
            for sink, position in zip(sinks, self.positions, strict=True):
                assert sink.text == "".join(f"{i} " for i in range(position))
                assert sink.num_endings == (position == NUM_TOKENS)

    @invariant()
    def members_that_left_hear_nothing_more(self) -> None:
        for sinks, texts in self.left:
            assert [sink.text for sink in sinks] == texts

    @invariant()
    def every_generation_ends_once(self) -> None:
        assert self.generation is None or min(self.positions) < NUM_TOKENS
        assert len(self.flights) == (self.generation is not None)

    def _cancelled(self) -> None:
        self.num_cancelled += 1
        self.generation = None

    def _completed(self, generation: SharedGeneration) -> None:
        assert self.positions == [NUM_TOKENS] * NUM_SEQUENCES
        for sinks in self.members:
            assert [sink.text for sink in sinks] == ["0 1 2 3 4 5 "] * NUM_SEQUENCES
        self.num_completed += 1
        self.members = []
        self.generation = None


class TestSingleFlight(SingleFlightMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
class TestSingleFlightAtLength(SingleFlightMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)


def test_one_members_trouble_is_not_the_others() -> None:
    class BrokenSink(TextSink):
        def deliver(self, delta: Delta) -> None:
            raise RuntimeError("broken sink")

    generation = SingleFlight().lead(KEY, 1)
    broken, whole = BrokenSink(), TextSink()
    generation.join([broken])
    generation.join([whole])
    for position in range(NUM_TOKENS):
        generation.sequences[0].deliver(delta(position))
    assert whole.text == "0 1 2 3 4 5 "
    assert broken.error is not None


def test_what_still_comes_of_a_generation_that_all_have_left_is_no_answer_to_keep() -> None:
    completed: list[SharedGeneration] = []
    generation, sinks = SingleFlight().lead(KEY, 1, completed.append), [TextSink()]
    generation.join(sinks)
    generation.leave(sinks)
    for position in range(NUM_TOKENS):
        generation.sequences[0].deliver(delta(position))
    assert not completed
