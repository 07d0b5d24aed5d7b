"""Whether running sequences are in the phases and counts that their counters say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_worker.core.running_set import RunningSet
from tests.gpu_worker.core.sequences import make_sequence


def _forget_phase(running: RunningSet) -> None:
    running.catching_up["interactive"].update(running.decoding["interactive"])
    running.decoding["interactive"].clear()


def _let_prompt_be_due(running: RunningSet) -> None:
    running.due["interactive"].update(running.catching_up["interactive"])


def _count_batch(running: RunningSet) -> None:
    running.num_batch += 1


def _count_needing_last_token(running: RunningSet) -> None:
    running.num_needing_last_token += 1


@pytest.mark.parametrize("damage", [_forget_phase, _let_prompt_be_due, _count_batch, _count_needing_last_token])
def test_damaged_set_does_not_pass_the_check(damage: Callable[[RunningSet], None]) -> None:
    running = RunningSet()
    for num_computed in (0, 4):
        sequence = make_sequence(5)
        sequence.num_computed_tokens, sequence.max_num_tokens = num_computed, 13
        running.add(sequence)
    running.check_integrity()
    running.put_back("interactive", running.take_due("interactive", running.decoding["interactive"].values()))
    assert [len(each["interactive"]) for each in (running.catching_up, running.decoding, running.due)] == [1, 1, 1]
    damage(running)
    with pytest.raises(AssertionError):
        running.check_integrity()
