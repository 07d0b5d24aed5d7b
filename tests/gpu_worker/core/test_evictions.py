"""What eviction does to the blocks of a sequence, and of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.core.block_budget import BlockBudget, block_budget
from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.evictions import Evictions
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.errors import BadRequestError
from shared.kv_budget import KvBudget
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.sequences import kept_tokens, make_sequence

BUDGET = BlockBudget(num_blocks=6, num_sinks=1, num_evicted=2, block_size=BLOCK)


def budgeted(prompt: list[int] | int, budget: BlockBudget = BUDGET, **fields: object) -> Sequence:
    sequence = make_sequence(prompt, **fields)  # type: ignore[arg-type]
    sequence.budget = budget
    return sequence


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
