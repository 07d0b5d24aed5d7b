from __future__ import annotations

import pytest

from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.state_slots import StateSlots
from tests.gpu_worker.core.harness import Harness
from tests.gpu_worker.core.sequences import make_sequence


def harness_of(num_slots: int = 12, interval: int = 64, **settings: object) -> Harness:
    return Harness(state=StateConfig(num_slots, interval), **settings)  # type: ignore[arg-type]


def cached_tokens(harness: Harness, *sequences: Sequence) -> list[int]:
    """Run sequences one after another; return how many tokens of each prompt were found."""
    for sequence in sequences:
        harness.add(sequence)
        harness.run_to_reference(sequence)
    return [sequence.num_cached_tokens for sequence in sequences]


def saves_of(harness: Harness, sequence: Sequence) -> list[int]:
    """Return behind how many tokens of a sequence checkpoints were made."""
    items = [item for plan in harness.runner.plans for item in plan.scheduled if item.sequence is sequence]
    return [item.start + num_tokens for item in items if item.state for num_tokens, _ in item.state.saves]


def test_same_prompt_starts_behind_the_last_block_of_the_first_one() -> None:
    first, second = (make_sequence(range(1, 31), max_tokens=1) for _ in range(2))
    harness = harness_of()
    assert cached_tokens(harness, first, second) == [0, 28]
    assert saves_of(harness, first) == [28]
    assert harness.runner.num_loads == 1


def test_checkpoint_that_is_brought_twice_takes_one_slot() -> None:
    states = harness_of().scheduler._blocks.states
    assert states is not None
    for slot in [states.hold(1) for _ in range(2)]:
        states.let_go(slot, b"digest")
    assert (states.num_checkpoints, states.num_available) == (1, states.num_slots)
    states.check_integrity([])


def test_next_turn_starts_behind_the_last_block_of_the_answer() -> None:
    first = make_sequence(range(1, 31), max_tokens=21)
    harness = harness_of()
    cached_tokens(harness, first)
    follow_up = make_sequence([*first.token_ids, 7, 8, 9], max_tokens=1)
    # The last token that was sampled was not computed.
    assert cached_tokens(harness, follow_up) == [48]


def test_one_checkpoint_stays_behind_the_prompt() -> None:
    harness, sequence = harness_of(), make_sequence(range(1, 31), max_tokens=100)
    cached_tokens(harness, sequence)
    assert len(saves_of(harness, sequence)) > 20
    blocks = harness.scheduler._blocks
    assert blocks.states is not None
    assert blocks.states.num_checkpoints == 2


def test_checkpoint_behind_the_prompt_from_which_somebody_has_started_stays() -> None:
    harness, first = harness_of(max_num_batched_tokens=64), make_sequence(range(1, 31), max_tokens=40)
    harness.add(first)
    while len(first.token_ids) < 38:
        harness.step()
    prefix = first.token_ids[:37]
    harness.add(second := make_sequence([*prefix, 7], max_tokens=1))
    harness.run()
    assert second.num_cached_tokens == 36
    assert cached_tokens(harness, make_sequence([*prefix, 8], max_tokens=1)) == [36]


def test_second_sight_of_a_prefix_makes_a_checkpoint_where_the_texts_part() -> None:
    sequences = [
        make_sequence([*range(1, 42), *range(1000 * (number + 1), 1000 * (number + 1) + 20)], max_tokens=1)
        for number in range(4)
    ]
    assert cached_tokens(harness_of(), *sequences) == [0, 0, 40, 40]


def test_long_prompt_leaves_checkpoints_on_its_way() -> None:
    harness, sequence = harness_of(interval=4), make_sequence(range(1, 70), max_tokens=1)
    cached_tokens(harness, sequence)
    assert saves_of(harness, sequence) == [16, 32, 48, 64, 68]


def test_checkpoint_that_costs_least_to_compute_again_is_evicted() -> None:
    harness = harness_of(num_slots=4, max_num_seqs=1)
    long, short, other, last = (make_sequence(length, max_tokens=1) for length in (61, 9, 31, 22))
    cached_tokens(harness, long, short, other, last)
    again = [make_sequence(old.token_ids[: old.num_prompt_tokens], max_tokens=1) for old in (long, other, last, short)]
    assert cached_tokens(harness, *again) == [60, 28, 20, 0]


@pytest.mark.parametrize(
    ("num_slots", "interval", "num_tokens", "others", "num_found"),
    [
        # Nobody uses it: it gives way in the end.
        (3, 64, 100, [20] * 12, 0),
        # Behind 20 and 40 tokens: without the first one, the second costs twice as much, and ages all the same.
        (3, 5, 41, [17] * 2, 40),
        (3, 5, 41, [17] * 3, 0),
        # Behind 20 tokens there is none any more, so that the one behind 60 was cheaper than the one behind 40.
        (4, 5, 61, [17] * 2, 40),
    ],
)
def test_checkpoint_is_kept_by_its_cost_from_the_nearest_before_and_its_age(
    num_slots: int, interval: int, num_tokens: int, others: list[int], num_found: int
) -> None:
    # Of blocks there are enough for all.
    harness = harness_of(num_slots, interval, max_num_seqs=1, num_blocks=512)
    long = make_sequence(num_tokens, max_tokens=1)
    cached_tokens(harness, long, *(make_sequence(length, max_tokens=1) for length in others))
    assert cached_tokens(harness, make_sequence(long.token_ids[:num_tokens], max_tokens=1)) == [num_found]


def test_checkpoint_that_is_used_again_and_again_stays() -> None:
    harness = harness_of(num_slots=4, max_num_seqs=1, num_blocks=512)
    first = make_sequence(20, max_tokens=1)
    cached_tokens(harness, first)
    for _ in range(6):
        again = make_sequence(first.token_ids[:20], max_tokens=1)
        assert cached_tokens(harness, make_sequence(20, max_tokens=1), again) == [0, 16]


def test_of_retained_checkpoints_the_one_goes_first_that_costs_least_and_was_not_used_again() -> None:
    states = StateSlots(StateConfig(num_slots=3, interval_blocks=64), block_size=4, retained_share=1.0)
    for digest, num_blocks in ((b"used", 2), (b"unused", 3), (b"ordinary", 9)):
        states.let_go(states.hold(num_blocks), digest)
    states.retain("t", 1.0, [b"used", b"unused"], until=60.0)
    states.let_go(states.hold(1), None)
    assert not states.has(b"ordinary")
    # Its priority is 8 tokens, and from now on the 36 of the evicted one besides.
    sequence = make_sequence(9)
    sequence.state_slot = states.open([b"first", b"used"], 2, 2)
    states.close(sequence)
    for _ in range(2):
        states.hold(1)
    assert (states.has(b"used"), states.has(b"unused")) == (True, False)
    # New checkpoints begin where evictions are, not behind retained ones that were passed over.
    assert states._last_cost == 36


def test_cost_of_a_checkpoint_that_has_none_before_is_counted_from_the_beginning() -> None:
    harness = harness_of(num_slots=4, interval=5, max_num_seqs=1, num_blocks=512)
    # Behind 20 tokens and 32, which is 12 more, and behind 12: of these two the older one goes.
    long, short, other = (make_sequence(length, max_tokens=1) for length in (33, 13, 17))
    cached_tokens(harness, long, short, other)
    again = [make_sequence(old.token_ids[: old.num_prompt_tokens], max_tokens=1) for old in (short, long)]
    assert cached_tokens(harness, *again) == [12, 20]


def test_checkpoint_that_was_pinned_when_another_had_to_go_can_be_evicted_later() -> None:
    harness = harness_of(num_slots=4, max_num_seqs=4, num_blocks=512, max_num_batched_tokens=256)
    long, short = (make_sequence(length, max_tokens=1) for length in (61, 17))
    cached_tokens(harness, long, short)
    harness.add(make_sequence([*short.token_ids[:16], 7], max_tokens=1), make_sequence(33, max_tokens=1))
    harness.run()
    sequences = [make_sequence(9, max_tokens=3) for _ in range(4)]
    harness.add(*sequences)
    harness.run_to_reference(*sequences)


def test_two_that_compute_the_same_prompt_at_once_leave_one_checkpoint() -> None:
    harness = harness_of(max_num_batched_tokens=256)
    harness.add(*(make_sequence(range(1, 31), max_tokens=1) for _ in range(2)))
    harness.run()
    states = harness.scheduler._blocks.states
    assert states is not None
    assert len([plan for plan in harness.runner.plans if len(plan.scheduled) == 2]) == 1
    states.check_integrity([])
    assert (states.num_checkpoints, states.num_available) == (1, states.num_slots)


def test_prompt_of_whole_blocks_leaves_a_checkpoint_for_itself_and_one_for_who_goes_on() -> None:
    harness, first = harness_of(), make_sequence(range(1, 33), max_tokens=1)
    assert cached_tokens(harness, first, make_sequence(range(1, 33), max_tokens=1)) == [0, 28]
    assert saves_of(harness, first) == [28, 32]
    assert cached_tokens(harness, make_sequence([*range(1, 33), 7, 8], max_tokens=1)) == [32]


def test_checkpoints_of_the_interval_stay_behind_the_prompt() -> None:
    harness, sequence = harness_of(interval=4), make_sequence(range(1, 10), max_tokens=60)
    cached_tokens(harness, sequence)
    states = harness.scheduler._blocks.states
    assert states is not None
    # Behind 8 tokens, 16, 32, 48 and 64, and the last full block.
    assert states.num_checkpoints == 6


def test_hits_on_one_checkpoint_leave_no_entries_behind() -> None:
    harness = harness_of(num_slots=4, max_num_seqs=1)
    cached_tokens(harness, *(make_sequence(range(1, 31), max_tokens=1) for _ in range(20)))
    states = harness.scheduler._blocks.states
    assert states is not None
    assert len(states._heap) <= 2 * states.num_slots


def test_sequence_takes_over_the_last_slot_with_what_it_starts_from() -> None:
    harness = harness_of(num_slots=2, max_num_seqs=2, max_num_batched_tokens=64)
    harness.add(first := make_sequence(range(1, 31), max_tokens=1))
    harness.run()
    harness.add(make_sequence(20, max_tokens=40), second := make_sequence(range(1, 31), max_tokens=1))
    harness.run()
    assert second.num_cached_tokens == 28
    harness.assert_reference(first, second)


def test_without_a_prefix_cache_no_checkpoint_is_made() -> None:
    harness, sequence = harness_of(enable_prefix_caching=False), make_sequence(range(1, 70), max_tokens=9)
    cached_tokens(harness, sequence)
    assert saves_of(harness, sequence) == []


def test_steps_that_fail_begin_again_from_a_checkpoint() -> None:
    harness = harness_of(interval=2, max_num_batched_tokens=16)
    harness.add(sequence := make_sequence(range(1, 60), max_tokens=12))
    for _ in range(3):
        harness.step()
    harness.schedule()
    items = harness.lose()
    assert [(item.start, item.num_tokens) for item in items] == [(48, 11)]
    harness.schedule_again(items)
    harness.land()
    harness.run_to_reference(sequence)


def test_fewer_slots_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="3 slots for states must be at least max_num_seqs"):
        SchedulerConfig(4, 100, 4, 8, 1000, state=StateConfig(3, 4))


def test_usage_names_every_kind_of_memory() -> None:
    harness = harness_of(num_slots=4, windows=(WindowConfig(8, 16),))
    assert harness.scheduler.stats.groups == (("full", 0, 64), ("window-8", 0, 16), ("state", 0, 4))
    harness.add(make_sequence(12, max_tokens=30))
    for _ in range(2):
        harness.step()
    (_, full, _), (_, window, _), (_, state, _) = harness.scheduler.stats.groups
    assert full >= 3
    assert 0 < window <= 3
    assert state >= 1


def test_checkpoints_that_anybody_may_displace_are_not_in_use() -> None:
    """Checkpoints take every slot in time, so counting them would show an idle worker as full."""
    harness = harness_of(num_slots=4, interval=1)
    cached_tokens(harness, make_sequence(range(1, 61), max_tokens=8))
    states = harness.scheduler._blocks.states
    assert states is not None
    assert states.num_checkpoints >= 3
    assert harness.scheduler.stats.groups[-1] == ("state", 0, 4)


def test_checkpoint_that_may_be_wrong_is_found_by_nobody_while_it_is_read_and_free_afterwards() -> None:
    harness = harness_of()
    first, second, third = (make_sequence(range(1, 31), max_tokens=1) for _ in range(3))
    cached_tokens(harness, first)
    states = harness.scheduler._blocks.states
    assert states is not None
    harness.add(second)
    harness.schedule()
    assert second.state_slot is not None
    # Its own slot, and the one that it is about to read.
    assert states.num_used == 2
    states.hide(second)
    states.check_integrity([second.state_slot])
    assert states.num_checkpoints == 0
    harness.land()
    harness.run()
    assert states.num_available == states.num_slots
    assert cached_tokens(harness, third) == [0]


def test_all_checkpoints_of_a_sequence_that_may_be_wrong_are_found_by_nobody() -> None:
    harness, sequence = harness_of(interval=2), make_sequence(range(1, 31), max_tokens=8)
    harness.add(sequence)
    while len(sequence.token_ids) < 34:
        harness.step()
    states = harness.scheduler._blocks.states
    assert states is not None
    assert states.num_checkpoints >= 3
    states.hide(sequence)
    assert states.num_checkpoints == 0


@pytest.mark.parametrize(("num_slots", "interval"), [(6, 2), (40, 64)])
def test_what_is_known_of_checkpoints_does_not_grow_with_the_text(num_slots: int, interval: int) -> None:
    harness = harness_of(num_slots, interval, num_blocks=512)
    sequences = [make_sequence(9, max_tokens=400, ignore_eos=True) for _ in range(4)]
    harness.add(*sequences)
    for _ in range(390):
        harness.step()
    states = harness.scheduler._blocks.states
    assert states is not None
    assert len(states._heap) <= 2 * num_slots
    assert [len(sequence.state_slot.checkpoints) <= num_slots for sequence in sequences if sequence.state_slot] == [
        True
    ] * 4
    harness.scheduler.check_integrity()
