import pytest

from gpu_worker.core.running_set import RunningSet
from gpu_worker.core.sequence import Sequence
from tests.gpu_worker.core.sequences import make_sequence


def decoding(running: RunningSet, **settings: object) -> Sequence:
    """Add a sequence with one token left to compute."""
    sequence = make_sequence(6, **settings)  # type: ignore[arg-type]
    sequence.max_num_tokens, sequence.num_computed_tokens = 16, 5
    running.add(sequence)
    return sequence


@pytest.fixture
def running() -> RunningSet:
    return RunningSet()


def test_new_decode_is_due_until_it_was_looked_at(running: RunningSet) -> None:
    sequence = decoding(running)
    decodes = running.decodes("interactive", is_behind=False)
    assert running.due_among("interactive", decodes) == [sequence]
    running.due["interactive"].clear()
    assert running.due_among("interactive", decodes) == []
    running.check_integrity()


def test_decode_that_fills_a_block_is_due_again(running: RunningSet) -> None:
    sequence = decoding(running)
    running.due["interactive"].clear()
    sequence.num_computed_tokens = 8
    running.reach_boundary(sequence, 12)
    assert list(running.due["interactive"].values()) == [sequence]
    assert sequence.next_boundary == 12
    # The last token comes before the next block is full.
    sequence.num_computed_tokens = 12
    running.reach_boundary(sequence, 16)
    assert sequence.next_boundary == 15


def test_decode_whose_next_token_is_its_last_lands(running: RunningSet) -> None:
    sequence = decoding(running)
    sequence.num_computed_tokens = 15
    running.reach_boundary(sequence, 16)
    assert list(running.landing.values()) == [sequence]
    assert not running.due["interactive"]
    running.check_integrity()


def test_only_decodes_of_the_step_are_looked_at(running: RunningSet) -> None:
    first, second = decoding(running), decoding(running)
    assert running.due_among("interactive", [second]) == [second]
    assert running.due_among("interactive", [first, second]) == [first, second]


def test_sequence_that_leaves_is_not_due(running: RunningSet) -> None:
    sequence = decoding(running)
    running.remove(sequence)
    assert not running.due["interactive"]
    assert running.departed == [sequence]
