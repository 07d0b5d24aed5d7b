"""How a step that failed is computed again, group by group; what comes of it is in the tests of the scheduler."""

from __future__ import annotations

from gpu_worker.core.group_tables import StateSlot
from gpu_worker.core.isolation import Isolation, control_share, restarted_shares
from gpu_worker.core.plan import StateWork
from gpu_worker.core.step import ScheduledSequence
from tests.gpu_worker.core.sequences import make_sequence

BLOCK = 4


def shares(*num_tokens: int) -> list[ScheduledSequence]:
    return [ScheduledSequence(make_sequence(number), 0, number, True) for number in num_tokens]


def test_runner_has_to_prove_itself_after_each_step_that_failed() -> None:
    isolation = Isolation()
    for _ in range(2):
        isolation.split(shares(3, 3))
        assert not isolation.is_runner_proven
        isolation.is_runner_proven = True
        while isolation.next_group():
            pass
        assert not isolation.is_active


def test_sequence_alone_in_a_step_is_computed_once_more_before_it_is_at_fault() -> None:
    isolation, group = Isolation(), shares(3)
    assert isolation.split(group) is None
    assert isolation.next_group() == group
    assert isolation.split(group) is group[0].sequence


def test_shares_that_begin_again_fit_into_one_step() -> None:
    assert [item.num_tokens for item in restarted_shares(shares(30, 5), 16)] == [8, 5]


def test_control_step_begins_a_state_of_its_own_in_the_slot_of_the_sequence() -> None:
    sequence = make_sequence(6)
    sequence.block_table = [7, 8]
    sequence.num_computed_tokens = 5
    assert control_share(sequence, BLOCK).state is None
    sequence.state_slot = StateSlot(2, None, 0)
    share = control_share(sequence, BLOCK)
    assert (share.sequence.block_table, share.sequence.state_slot) == ([8], sequence.state_slot)
    assert share.state == StateWork(is_first=True)
