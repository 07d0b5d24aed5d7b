"""What eviction does to the blocks of a sequence, and of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.core.block_budget import BlockBudget, BlockScores, block_budget
from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.evictions import Evictions
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.errors import BadRequestError
from shared.kv_budget import EvictedBlocks, KvBudget
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.sequences import kept_tokens, limit, make_sequence

BUDGET = BlockBudget(num_blocks=6, num_sinks=1, num_evicted=2, block_size=BLOCK)


def budgeted(prompt: list[int] | int, budget: BlockBudget = BUDGET, **fields: object) -> Sequence:
    return limit(make_sequence(prompt, **fields), budget)  # type: ignore[arg-type]


def full(pool: BlockPool) -> Sequence:
    sequence = budgeted(100)
    sequence.block_table, sequence.num_computed_tokens = pool.allocate(6), 6 * BLOCK
    return sequence


@pytest.mark.parametrize("tokens", [64, 100, 512, 1000])
def test_count_of_evicted_tokens_is_that_of_the_oracle(tokens: int) -> None:
    budget = block_budget(KvBudget(tokens), 16, 1000)
    assert budget.num_tokens == tokens // 16 * 16
    sizes = budget.num_tokens, 16 * budget.num_sinks, 16 * budget.num_evicted
    for num_computed in range(1, 3 * tokens, 7):
        kept = kept_tokens(num_computed - 1, *sizes)
        assert budget.num_evicted_tokens(num_computed) == num_computed - len(kept)


def test_budget_outside_the_limits_is_refused() -> None:
    with pytest.raises(BadRequestError, match=r"is 63, but it must be 64 to 320 here\."):
        block_budget(KvBudget(63), 16, 20)
    with pytest.raises(BadRequestError, match=r"is 336, but it must be 64 to 320 here\."):
        block_budget(KvBudget(336), 16, 20)
    with pytest.raises(BadRequestError, match="no budget fits"):
        block_budget(KvBudget(64), 16, 3)


def test_own_blocks_turn_in_place_and_the_oldest_are_written_again() -> None:
    pool = BlockPool(8)
    sequence = full(pool)
    before, evictions = sequence.block_table, Evictions(pool)
    assert evictions.is_due(sequence)
    evictions.evict(sequence, 2)
    assert sequence.block_table == [before[0], *before[3:], before[1], before[2]]
    (told,) = evictions.take(1)
    assert told.moves == [(block, block, 2 * BLOCK) for block in before[3:]]
    assert told.num_evicted == sequence.num_evicted_tokens == 2 * BLOCK
    assert not evictions.is_due(sequence)
    assert evictions.take(2) == []
    assert pool.num_available == 2


def test_found_blocks_stay_as_they_are_and_are_held_until_their_copy_is_made() -> None:
    pool = BlockPool(12)
    sequence = full(pool)
    before, evictions = sequence.block_table, Evictions(pool)
    for place, block in enumerate(before):
        pool.label(block, b"%d" % place)
    evictions.evict(sequence, 6)
    (told,) = evictions.take(5)
    assert [source for source, _, _ in told.moves] == before[3:]
    targets = [target for _, target, _ in told.moves]
    assert not set(targets) & set(before)
    assert sequence.block_table == [before[0], *targets]
    assert all(pool.is_in_use(block) for block in before), "a step in flight may still read them"
    evictions.land(4)
    assert all(pool.is_in_use(block) for block in before)
    evictions.land(5)
    assert [pool.is_in_use(block) for block in before] == [True] + [False] * 5
    assert [pool.find(b"%d" % place) for place in range(6)] == before


def test_found_blocks_give_way_where_blocks_are_short() -> None:
    pool = BlockPool(6)
    sequence = full(pool)
    before, evictions = sequence.block_table, Evictions(pool)
    for place, block in enumerate(before):
        pool.label(block, b"%d" % place)
    evictions.evict(sequence, 0)
    assert set(sequence.block_table) == set(before)
    assert pool.find(b"0") == before[0]
    assert all(pool.find(b"%d" % place) is None for place in range(1, 6)), "found with keys of other positions"


def test_blocks_that_others_hold_are_copied_or_the_eviction_waits() -> None:
    pool = BlockPool(6)
    sequence = full(pool)
    pool.share(sequence.block_table[4:5])
    assert not Evictions(pool).can_evict(sequence)
    pool.release(sequence.block_table[4:5])
    assert Evictions(pool).can_evict(sequence)


def test_sequence_of_a_budget_holds_no_more_blocks_over_a_long_text() -> None:
    config = SchedulerConfig(block_size=16, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=640)
    engine = Engine(Scheduler(config), SimulatedRunner(0, range(5, 90)))
    budget = block_budget(KvBudget(160), 16, 40)
    long, short = budgeted(3000, budget, max_tokens=17_000, id="long"), make_sequence(400, max_tokens=200, id="short")
    long.token_ids = [7] * 600
    long.num_prompt_tokens = 600
    engine.add(long)
    engine.add(short)
    num_tokens = {"long": 0, "short": 0}
    while engine.has_work():
        for event in engine.step():
            num_tokens[event.sequence.id] += len(event.token_ids)
        assert len(long.block_table) <= 10
    assert num_tokens == {"long": 17_000, "short": 200}
    assert engine.stats.num_preemptions == 0
    assert engine.stats.free_blocks == 40
    assert long.num_evicted_at(17_000) == budget.num_evicted_tokens(17_599) > 17_000


def test_prompt_of_a_budget_must_fit_into_the_context() -> None:
    harness = Harness(max_model_len=40)
    with pytest.raises(BadRequestError, match="maximum context length is 40"):
        harness.add(budgeted(40))
    sequence = budgeted(39, max_tokens=90, ignore_eos=True)
    harness.add(sequence)
    while harness.scheduler.has_work():
        harness.step()
    harness.assert_reference(sequence)


def test_step_that_evicts_and_fails_is_computed_once_more_and_no_third_time() -> None:
    harness = Harness()
    sequence, other = budgeted(20, max_tokens=60, ignore_eos=True), make_sequence(5, max_tokens=60, ignore_eos=True)
    harness.add(sequence, other)
    for _ in range(2):
        while sequence.num_evicted_tokens == 0:
            step = harness.schedule()
            if sequence.num_evicted_tokens == 0:
                harness.settle(step)
        assert harness.in_flight
        harness.lose()
        harness.scheduler.check_integrity()
    assert (sequence.status, harness.finish[sequence.id]) == (SequenceStatus.FINISHED, "failed")
    while harness.scheduler.has_work():
        harness.step()
    harness.assert_reference(other)


HEAVY, LASTING = (BlockBudget(8, 1, 2, BLOCK, policy, 4) for policy in ("heavy_hitters", "persistence"))


def test_blocks_between_sinks_and_recent_ones_leave_that_got_the_least_attention() -> None:
    scores = BlockScores(HEAVY)
    for _ in range(2):
        scores.add([0, 3, 1, 2, 0, 0, 0, 0])
    assert scores.places(0) == (2, 3)
    scores.evict(0, (2, 3))
    # Only what was paid since counts.
    scores.add([0, 0, 7, 8, 9, 0, 0, 0])
    assert scores.places(1) == (1, 2)
    scores.evict(1, (1, 2))
    assert scores.decisions == [(2, 3), (1, 2)]


def test_block_that_got_more_than_its_share_more_often_stays_whatever_it_got() -> None:
    heavy, lasting = BlockScores(HEAVY), BlockScores(LASTING)
    for number, (place, attention) in enumerate([(2, 5.0), (2, 5.0), (1, 90.0)]):
        for scores in (heavy, lasting):
            scores.add([attention if block == place else 0.0 for block in range(8)])
            if number < 2:
                scores.evict(number, (6, 7))
    assert (heavy.places(2), lasting.places(2)) == ((2, 3), (1, 3))


def test_decisions_are_repeated_where_the_sequence_is_computed_again() -> None:
    first = BlockScores(HEAVY)
    first.add([0, 0, 5, 0, 0, 0, 0, 0])
    first.evict(0, first.places(0))
    told = first.told(0)
    assert told == EvictedBlocks(BLOCK, (1, 3))
    again = BlockScores(HEAVY, (1, 3))
    again.add([0, 9, 0, 9, 0, 0, 0, 0])
    assert again.places(0) == (1, 3)
    again.evict(0, (1, 3))
    assert again.told(1) is None
    again.evict(1, (2, 3))
    more = again.told(1)
    assert more == EvictedBlocks(BLOCK, (2, 3), first=2)
    assert again.told(0) == EvictedBlocks(BLOCK, (1, 3, 2, 3))


def test_keys_turn_back_by_what_left_before_them() -> None:
    pool = BlockPool(8)
    sequence = limit(make_sequence(100), HEAVY, [(1, 3)])
    sequence.block_table, sequence.num_computed_tokens = pool.allocate(8), 8 * BLOCK
    before, evictions = sequence.block_table, Evictions(pool)
    evictions.evict(sequence, 0)
    (told,) = evictions.take(1)
    shifts = [BLOCK, *[2 * BLOCK] * 4]
    kept = [before[2], *before[4:]]
    assert told.moves == [(block, block, shift) for block, shift in zip(kept, shifts, strict=True)]
    assert sequence.block_table == [before[0], *kept, before[1], before[3]]


def test_eviction_by_attention_waits_for_the_steps_that_tell_it() -> None:
    """A device that runs behind: with sinks two steps are in flight throughout."""
    for policy, waits in (("sinks", False), ("heavy_hitters", True)):
        harness = Harness(max_steps_in_flight=2)
        sequence = budgeted(20, BlockBudget(6, 1, 2, BLOCK, policy, 2), max_tokens=60, ignore_eos=True)  # type: ignore[arg-type]
        harness.add(sequence)
        in_flight = set()
        while harness.scheduler.has_work():
            num_evicted = sequence.num_evicted_tokens
            plan = harness.try_schedule() if harness.can_submit() else None
            if sequence.num_evicted_tokens > num_evicted:
                in_flight.add(len(harness.in_flight) - (plan is not None))
            if plan is None or not harness.can_submit():
                harness.land()
        assert (in_flight == {0}) if waits else (1 in in_flight)
        harness.assert_reference(sequence)


def test_budget_may_be_the_whole_context_and_no_block_more() -> None:
    assert block_budget(KvBudget(160), 16, 10).num_blocks == 10
    with pytest.raises(BadRequestError, match="to 144 here"):
        block_budget(KvBudget(160), 16, 9)


@pytest.mark.parametrize(("shared", "can"), [((1, 2), True), ((3,), False), ((), True)])
def test_blocks_that_leave_need_no_copies_and_those_that_stay_do(shared: tuple[int, ...], can: bool) -> None:
    pool: Any = SimpleNamespace(num_holders=lambda block: 1 + (block in shared), num_available=0)
    sequence = make_sequence([1])
    sequence.budget, sequence.block_table = BlockBudget(8, 1, 2, 4), list(range(8))
    assert Evictions(pool).can_evict(sequence) is can
