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
    assert running.take_due("interactive", decodes) == [sequence]
    assert running.take_due("interactive", decodes) == []
    running.put_back("interactive", [sequence])
    assert running.take_due("interactive", decodes) == [sequence]
    running.check_integrity()


def test_decode_that_fills_a_block_is_due_again(running: RunningSet) -> None:
    sequence = decoding(running)
    running.take_due("interactive", [sequence])
    sequence.num_computed_tokens = 8
    running.reach_boundaries([sequence], 4)
    assert sequence.next_boundary == 12
    assert running.take_due("interactive", [sequence]) == [sequence]
    # The last token comes before the next block is full.
    sequence.num_computed_tokens = 13
    running.reach_boundaries([sequence], 4)
    assert sequence.next_boundary == 15


def test_decode_whose_next_token_is_its_last_lands(running: RunningSet) -> None:
    sequence = decoding(running)
    sequence.num_computed_tokens = 15
    running.reach_boundaries([sequence], 4)
    assert list(running.finishing.values()) == [sequence]
    assert not running.due["interactive"]
    running.check_integrity()


def test_only_decodes_of_the_step_are_looked_at(running: RunningSet) -> None:
    first, second = decoding(running), decoding(running)
    assert running.take_due("interactive", [second]) == [second]
    assert running.take_due("interactive", [first, second]) == [first]


def test_sequence_that_leaves_is_not_due(running: RunningSet) -> None:
    sequence = decoding(running)
    running.remove(sequence)
    assert not running.due["interactive"]
    assert running.departed == [sequence]
