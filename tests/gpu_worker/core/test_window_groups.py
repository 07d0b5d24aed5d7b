import pytest

from gpu_worker.core.scheduler_config import SchedulerConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.window_blocks import WindowGroups
from tests.gpu_worker.core.sequences import make_sequence

BLOCK = 4


def groups_of(*windows: tuple[int, int]) -> WindowGroups:
    """Return groups of these windows and numbers of blocks."""
    configs = tuple(WindowConfig(window, num_blocks) for window, num_blocks in windows)
    return WindowGroups(SchedulerConfig(BLOCK, 100, 4, 16, 200, windows=configs))


def opened(groups: WindowGroups, expected: int = 0) -> Sequence:
    sequence = make_sequence(30)
    sequence.max_num_tokens, sequence.expected_blocks = 100, expected
    groups.open(sequence, 0, 0)
    return sequence


@pytest.fixture
def groups() -> WindowGroups:
    return groups_of((5, 10), (9, 20))


def test_sequence_has_a_table_in_each_group(groups: WindowGroups) -> None:
    sequence = opened(groups)
    assert [table.num_held for table in sequence.window_tables] == [1, 1]
    groups.grow(sequence, 11)
    assert [len(table.blocks) for table in sequence.window_tables] == [3, 3]
    groups.check_integrity([sequence])
    groups.close(sequence)
    assert sequence.window_tables == ()
    groups.check_integrity([])


def test_tokens_reach_as_far_as_in_the_group_that_has_least(groups: WindowGroups) -> None:
    first, second = opened(groups), opened(groups)
    groups.grow(first, 7 * BLOCK)
    assert groups.reach(second, 20) == 3 * BLOCK
    assert groups.usage == [("window-5", 8, 10), ("window-9", 8, 20)]
    assert groups.free_share(100) == 20


def test_sequences_can_grow_while_every_group_has_the_blocks(groups: WindowGroups) -> None:
    first, second = opened(groups), opened(groups)
    groups.grow(first, 8 * BLOCK)
    first.num_computed_tokens, second.num_computed_tokens = 8 * BLOCK, BLOCK
    assert groups.can_grow([first])
    assert not groups.can_grow([first, second])


def test_blocks_that_left_one_window_stay_in_another(groups: WindowGroups) -> None:
    sequence = opened(groups)
    groups.grow(sequence, 12)
    groups.publish(sequence, 8, is_findable=False)
    assert [table.num_released for table in sequence.window_tables] == [1, 0]
    # The offsets say behind which numbers of tokens there is something to give back.
    assert groups.offsets == {0}
    assert groups_of((6, 10), (9, 10)).offsets == {0, 1}


def test_what_is_promised_counts_against_newcomers(groups: WindowGroups) -> None:
    sequence = opened(groups, expected=2)
    assert groups.num_counted([sequence]) == [2, 2]
    assert groups.shortages(100) == [2 - 8, 3 - 18]


def test_models_without_windows_have_no_groups() -> None:
    none, sequence = groups_of(), make_sequence(30)
    none.open(sequence, 0, 0)
    assert not none
    assert none.free_share(77) == 77
    assert none.reach(sequence, 30) == 30
    assert none.can_grow([sequence])


def test_blocks_of_a_token_that_is_computed_ahead_are_not_taken_back(groups: WindowGroups) -> None:
    sequence = opened(groups)
    groups.grow(sequence, 40)
    for table in sequence.window_tables:
        table.num_told = len(table.blocks)
    # A step in flight computes token 33, which is not known yet.
    sequence.num_computed_tokens = 32
    groups.trim(sequence)
    assert [len(table.blocks) for table in sequence.window_tables] == [9, 9]
    # Other blocks that come there are to be told.
    assert [table.num_told for table in sequence.window_tables] == [9, 9]


def test_what_is_held_beyond_what_was_expected_is_counted(groups: WindowGroups) -> None:
    sequence = opened(groups)
    groups.grow(sequence, 12)
    assert groups.num_counted([sequence]) == [3, 3]


def test_block_that_was_given_back_is_not_found_for_what_it_held(groups: WindowGroups) -> None:
    sequence = opened(groups)
    groups.grow(sequence, 16)
    groups.publish(sequence, 12, is_findable=False)
    sequence.block_digests = [bytes([place]) for place in range(3)]
    groups.publish(sequence, 12, is_findable=True)
    for group, table in zip(groups, sequence.window_tables, strict=True):
        found = [group.pool.find(digest) is not None for digest in sequence.block_digests]
        assert found == [place >= table.num_released for place in range(3)]
