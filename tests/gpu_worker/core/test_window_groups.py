from __future__ import annotations

from hashlib import sha256

import pytest

from gpu_worker.core.scheduler_config import SchedulerConfig, WindowConfig
from gpu_worker.core.window_groups import WindowGroup
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.sequences import make_sequence

WINDOW = 8
MOST = 3


def digests(count: int) -> list[bytes]:
    return [sha256(bytes([place])).digest() for place in range(count)]


def harness_of(num_window_blocks: int = 12, **settings: object) -> Harness:
    return Harness(windows=(WindowConfig(WINDOW, num_window_blocks),), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("window", "most"), [(1, 1), (2, 2), (4, 2), (5, 2), (6, 3), (8, 3), (9, 3)])
def test_window_lies_in_one_block_more_than_it_fills(window: int, most: int) -> None:
    config = WindowConfig(window, 10)
    lies_in = {(start + window - 1) // BLOCK - start // BLOCK + 1 for start in range(BLOCK)}
    assert config.most_blocks(BLOCK) == most == max(lies_in)


def test_token_reads_its_window_and_no_block_before() -> None:
    group = WindowGroup(WindowConfig(WINDOW, 10), BLOCK)
    assert [group.first_needed(num_tokens) for num_tokens in range(14)] == [0] * 11 + [1] * 3


def test_hit_needs_the_whole_window_before_it() -> None:
    group, names = WindowGroup(WindowConfig(WINDOW, 20), BLOCK), digests(10)
    table = group.open([], 0, 0, ())
    group.grow(table, 10 * BLOCK)
    for place in (0, 1, 3, 4, 6, 8, 9):
        group.pool.label(table.blocks[place], names[place])
    resumable = [group.resumable(names, known) for known in range(11)]
    # Behind block 5 lie 3 and 4, behind the first ones all that there are; 6 and 8 stand alone.
    assert resumable == [0, 1, 2, 2, 2, 5, 5, 5, 5, 5, 10]


def test_long_sequence_holds_the_window_and_one_block() -> None:
    harness = harness_of(max_steps_in_flight=2, num_blocks=64)
    harness.add(sequence := make_sequence(3, max_tokens=60))
    held = []
    while harness.scheduler.has_work():
        harness.step()
        held.append(sequence.window_tables[0].num_held if sequence.window_tables else 0)
    assert harness.output[sequence.id] == harness.reference(sequence)[0]
    assert max(held) == MOST


def test_long_prompt_is_computed_in_chunks_as_large_as_there_are_blocks() -> None:
    harness = harness_of(5, max_num_batched_tokens=40)
    harness.add(sequence := make_sequence(50, max_tokens=2))
    chunks = []
    while harness.scheduler.has_work():
        harness.step()
        chunks.append(harness.runner.plans[-1].num_tokens)
        assert not sequence.window_tables or sequence.window_tables[0].num_held <= MOST
    # Five blocks at first; then what is left beside the window that the next tokens see.
    assert chunks[:3] == [20, 12, 12]
    assert harness.output[sequence.id] == harness.reference(sequence)[0]


def test_same_prompt_hits_while_its_window_is_there() -> None:
    harness = harness_of()
    first, second = (make_sequence(range(1, 30), max_tokens=1) for _ in range(2))
    harness.add(first)
    harness.run()
    harness.add(second)
    harness.run()
    assert second.num_cached_tokens == 28


def test_blocks_left_behind_are_reused_before_windows_of_ended_sequences() -> None:
    harness = harness_of(9, num_blocks=200)
    harness.add(make_sequence(range(1, 30), max_tokens=1))
    harness.run()
    harness.add(make_sequence(100, max_tokens=1))
    harness.run()
    harness.add(again := make_sequence(range(1, 30), max_tokens=1))
    harness.run()
    assert again.num_cached_tokens == 28


def test_second_sight_of_a_prefix_keeps_its_window() -> None:
    """Prompts that share 20 tokens and go on for longer than the window: the third one hits."""
    harness = harness_of(10, num_blocks=300)
    cached = []
    for number in range(4):
        sequence = make_sequence([*range(1, 21), *range(1000 * (number + 1), 1000 * (number + 1) + 40)], max_tokens=1)
        harness.add(sequence)
        harness.run()
        cached.append(sequence.num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] < 20
    assert cached[2:] == [20, 20]


def test_nobody_finds_what_a_sequence_with_an_error_has_left_behind() -> None:
    group, names = WindowGroup(WindowConfig(WINDOW, 20), BLOCK), digests(10)
    table = group.open([], 0, 0, ())
    group.grow(table, 10 * BLOCK)
    group.publish(table, names, 9)
    group.leave_behind(table, 36)
    assert table.num_released == 7
    group.hide(table, names)
    assert [group.resumable(names, known) for known in range(1, 10)] == [0] * 9
    group.close(table)
    group.check_integrity([])


def test_admission_waits_for_blocks_of_a_window() -> None:
    harness = harness_of(2 * MOST, max_num_seqs=4)
    sequences = [make_sequence(12, max_tokens=20) for _ in range(3)]
    harness.add(*sequences)
    harness.step()
    assert [bool(sequence.window_tables) for sequence in sequences] == [True, True, False]
    harness.run()
    assert all(harness.output[s.id] == harness.reference(s)[0] for s in sequences)


def test_free_blocks_are_scaled_to_the_group_that_has_fewest() -> None:
    harness = harness_of(6, num_blocks=60)
    assert harness.scheduler.stats.free_blocks == 60
    harness.add(make_sequence(4, max_tokens=30))
    harness.step()
    assert harness.scheduler.stats.free_blocks == 50


def test_group_that_cannot_hold_one_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window of 64 tokens must be at least 17"):
        SchedulerConfig(4, 100, 1, 8, 1000, windows=(WindowConfig(64, 16),))
    SchedulerConfig(4, 100, 1, 8, 20, windows=(WindowConfig(64, 5),))


def test_blocks_that_are_taken_back_are_promised_again_to_their_sequence_and_left_alone_by_others() -> None:
    group = WindowGroup(WindowConfig(WINDOW, 10), BLOCK)
    table, other = group.open([], 0, 5, ()), group.open([], 0, 1, ())
    reach = []
    for change, num_blocks in ((group.grow, 3), (group.trim, 2), (group.grow, 5), (group.trim, 2)):
        change(table, num_blocks * BLOCK)
        reach.append(group.reach(other, 100) // BLOCK)
        assert group.reach(other, 100, takes_promised=True) // BLOCK == 10 - num_blocks
    # One of its own, and what neither the other holds nor was promised.
    assert reach == [5, 5, 5, 5]
    group.close(table)
    assert group.reach(other, 100) // BLOCK == 10


def test_blocks_of_drafts_that_were_wrong_go_back_in_every_group() -> None:
    harness = harness_of(
        policy=FixedDepth(9), drafter=lambda tokens: [token_id + 1 for token_id in tokens], max_num_batched_tokens=32
    )
    harness.add(sequence := make_sequence(6, max_tokens=40, ignore_eos=True))
    harness.step()
    plan = harness.schedule()
    [table] = sequence.window_tables
    assert plan.scheduled[0].num_draft_tokens == 9
    assert len(table.blocks) == len(sequence.block_table) == 4
    harness.land()
    assert len(table.blocks) == len(sequence.block_table) == 2
    harness.scheduler.check_integrity()


def test_nothing_is_given_where_a_window_has_no_block_left(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, sequence = harness_of(), make_sequence(4, max_tokens=20)
    harness.add(sequence)
    harness.step()
    blocks, held = harness.scheduler._blocks, list(sequence.block_table)
    sequence.num_computed_tokens += 2 * BLOCK
    with monkeypatch.context() as patched:
        patched.setattr(type(blocks.windows), "can_grow", lambda self, sequences: False)
        assert not blocks.try_grow([sequence])
    assert sequence.block_table == held
    assert blocks.try_grow([sequence])
    assert len(sequence.block_table) > len(held)
