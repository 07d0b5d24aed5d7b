from __future__ import annotations

import pytest

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import SequenceStatus
from tests.gpu_worker.core.harness import Harness
from tests.gpu_worker.core.parts import Parts
from tests.gpu_worker.core.sequences import make_sequence


def test_nobody_is_preempted_in_vain_or_under_a_step_in_flight() -> None:
    parts = Parts(num_blocks=4, max_num_seqs=4)
    person, batch = parts.run(7, max_tokens=1), parts.run(7, lane="batch", max_tokens=1)
    # All that batch work holds would not be enough.
    large = parts.wait(12, max_tokens=1, arrival=1e6)
    assert parts.admission.admit_interactive(0.0)
    parts.live.finish(large)
    small = parts.wait(7, max_tokens=1, arrival=1e6)
    plan = parts.decode(person)
    assert not parts.admission.admit_interactive(0.0)
    assert (batch.status, small.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    parts.live.land(plan)
    assert parts.admission.admit_interactive(0.0)
    assert (batch.status, small.status) == (SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)


def test_sequence_that_fills_the_pool_starts_where_nothing_runs() -> None:
    parts = Parts(num_blocks=2)
    alone = parts.wait(8, max_tokens=1)
    assert parts.admission.fits(alone)
    parts.admission.admit_interactive(0.0)
    assert alone.status is SequenceStatus.RUNNING


def test_what_was_contributed_to_an_answer_before_a_preemption_is_computed_again() -> None:
    parts = Parts()
    sequence = parts.run(4)
    sequence.pooled.append(b"vector")
    parts.admission.preempt(sequence)
    parts.start(sequence, 9.0)
    assert sequence.pooled == []


def test_tenant_that_uses_more_gives_way_until_both_use_the_same() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=4)
    greedy = [parts.run(4, tenant="greedy") for _ in range(4)]
    polite = [parts.wait(4, tenant="polite", arrival=1e6) for _ in range(3)]
    assert parts.admission.admit_interactive(0.0)
    assert [sequence.status is SequenceStatus.RUNNING for sequence in polite] == [True, True, False]
    # The latest of the other tenant.
    assert [sequence.status is SequenceStatus.RUNNING for sequence in greedy] == [True, True, False, False]
    assert parts.admission.num_preemptions == 2
    for _ in range(3):
        parts.admission.admit_interactive(0.0)
    assert parts.admission.num_preemptions == 2
    parts.live.check_integrity()
    # What becomes free goes to the tenant that was served least.
    parts.live.waiting["interactive"].counters.tenants.account("greedy").counter += 100.0
    parts.live.finish(polite[0])
    parts.admission.admit_interactive(0.0)
    assert polite[2].status is SequenceStatus.RUNNING
    for sequence in polite[1:]:
        parts.live.finish(sequence)
    parts.admission.admit_interactive(0.0)
    assert {sequence.status for sequence in greedy} == {SequenceStatus.RUNNING}


def test_tenant_that_would_use_less_afterwards_does_not_give_way() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=3)
    greedy = [parts.run(4, tenant="greedy") for _ in range(2)]
    parts.run(4, tenant="polite", arrival=1e6)
    waiting = parts.wait(4, tenant="polite", arrival=1e6)
    parts.admission.admit_interactive(0.0)
    assert waiting.status is SequenceStatus.WAITING
    assert {sequence.status for sequence in greedy} == {SequenceStatus.RUNNING}
    assert parts.admission.num_preemptions == 0


def test_tenant_with_many_gives_way_and_not_one_with_few() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=4)
    greedy = [parts.run(4, tenant="greedy") for _ in range(3)]
    other = parts.run(4, tenant="other", arrival=1e6)
    polite = parts.wait(4, tenant="polite", arrival=2e6)
    parts.admission.admit_interactive(0.0)
    assert (polite.status, other.status) == (SequenceStatus.RUNNING, SequenceStatus.RUNNING)
    assert greedy[2].status is SequenceStatus.PREEMPTED


def test_batch_work_gives_way_before_tenants_do() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=3)
    greedy = [parts.run(4, tenant="greedy") for _ in range(2)]
    batch = parts.run(4, lane="batch", tenant="other")
    polite = [parts.wait(4, tenant="polite", arrival=1e6) for _ in range(2)]
    parts.admission.admit_interactive(0.0)
    assert (batch.status, polite[0].status) == (SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)
    # Two against one: with another of them it would be the same the other way round.
    assert {sequence.status for sequence in greedy} == {SequenceStatus.RUNNING}
    assert polite[1].status is SequenceStatus.WAITING


def test_blocks_are_shared_as_slots_are() -> None:
    parts = Parts(num_blocks=8, max_num_seqs=8)
    greedy = [parts.run(7, tenant="greedy", max_tokens=1) for _ in range(4)]
    polite = [parts.wait(7, tenant="polite", max_tokens=1, arrival=1e6) for _ in range(3)]
    parts.live.waiting["interactive"].counters.tenants.account("greedy").counter += 100.0
    parts.admission.admit_interactive(0.0)
    assert [sequence.status is SequenceStatus.RUNNING for sequence in polite] == [True, True, False]
    assert [sequence.status is SequenceStatus.RUNNING for sequence in greedy] == [True, True, False, False]
    # One that needs more than the other uses waits.
    parts.wait(15, tenant="third", max_tokens=1, arrival=2e6)
    parts.admission.admit_interactive(0.0)
    assert parts.admission.num_preemptions == 2


def test_one_sequence_that_uses_nearly_everything_is_not_preempted_for_ever() -> None:
    parts = Parts(num_blocks=8, max_num_seqs=8)
    large = parts.run(30, tenant="greedy", max_tokens=1)
    parts.wait(4, tenant="polite", max_tokens=1, arrival=1e6)
    parts.admission.admit_interactive(0.0)
    assert (large.status, parts.admission.num_preemptions) == (SequenceStatus.RUNNING, 0)


def test_priority_is_not_preempted_for_a_share() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=2)
    urgent = [parts.run(4, tenant="greedy", priority=1) for _ in range(2)]
    parts.wait(4, tenant="polite", arrival=1e6)
    parts.admission.admit_interactive(0.0)
    assert {sequence.status for sequence in urgent} == {SequenceStatus.RUNNING}


def test_when_blocks_run_out_the_tenant_that_uses_most_is_preempted_first() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=8)
    greedy = [parts.run(4, tenant="greedy") for _ in range(3)]
    parts.run(4, tenant="polite", arrival=1e6)
    assert parts.admission.worst() is greedy[2]
    least = parts.run(4, tenant="polite", priority=-1)
    assert parts.admission.worst() is least
    batch = parts.run(4, lane="batch", priority=9)
    assert parts.admission.worst() is batch


def test_prompt_of_another_tenant_starts_beside_a_long_one_that_takes_all_tokens_and_goes_before_it() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=4, budget=8)
    long = parts.wait(100, tenant="greedy")
    parts.admission.admit_interactive(0.0)
    long.num_computed_tokens = 8
    own, short = parts.wait(4, tenant="greedy", arrival=1e6), parts.wait(4, tenant="polite", arrival=2e6)
    parts.admission.admit_interactive(0.0)
    assert (own.status, short.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    assert parts.admission.ordered_prompts() == [short, long]
    # What it was served already counts: the other one goes on as soon as this tenant has had as much.
    parts.live.waiting["interactive"].counters.tenants.account("polite").counter += 1.0
    assert parts.admission.ordered_prompts() == [long, short]


def test_keys_of_one_tenant_start_in_turns() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=4)
    busy = [parts.wait(4, tenant="a", key="busy") for _ in range(4)]
    quiet = [parts.wait(4, tenant="a", key="quiet", arrival=1e6) for _ in range(2)]
    parts.admission.admit_interactive(0.0)
    assert [sequence.status is SequenceStatus.RUNNING for sequence in [*busy, *quiet]] == [1, 1, 0, 0, 1, 1]


def test_key_of_twice_the_weight_starts_twice_as_often() -> None:
    parts = Parts(num_blocks=64, max_num_seqs=6, budget=64)
    plain = [parts.wait(4, tenant="a") for _ in range(6)]
    heavy = [parts.wait(4, tenant="b", weight=2.0, arrival=1e6) for _ in range(6)]
    parts.admission.admit_interactive(0.0)
    assert [sum(s.status is SequenceStatus.RUNNING for s in sequences) for sequences in (plain, heavy)] == [2, 4]


def test_small_request_does_not_wait_for_the_room_of_a_large_one_that_is_before_it() -> None:
    parts = Parts(num_blocks=32, max_num_seqs=4, budget=200)
    running = parts.run(80, tenant="a", max_tokens=1)
    large = parts.wait(80, tenant="b", max_tokens=1)
    small = [parts.wait(30, tenant="c", max_tokens=1, arrival=1e6 + number) for number in range(3)]
    parts.live.waiting["interactive"].counters.tenants.account("c").counter += 10.0
    parts.admission.admit_interactive(0.0)
    # Two and what it had before are less than what the large one will have had when it has started; three are more.
    assert [sequence.status is SequenceStatus.RUNNING for sequence in small] == [True, False, False]
    assert (running.status, large.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    for sequence in small[:2]:
        sequence.num_computed_tokens = 30
        parts.live.finish(sequence)
        parts.admission.admit_interactive(0.0)
    assert small[1].num_charged_tokens == 30
    assert small[2].status is SequenceStatus.WAITING
    parts.live.finish(running)
    parts.admission.admit_interactive(0.0)
    assert large.status is SequenceStatus.RUNNING


@pytest.mark.parametrize(("num_blocks", "restarts"), [(20, False), (22, False), (23, True)])
def test_sequence_whose_blocks_another_one_keeps_restarts_only_where_there_are_enough_besides(
    num_blocks: int, restarts: bool
) -> None:
    harness = Harness(num_blocks=num_blocks, max_num_batched_tokens=64, headroom_tokens=0, state=StateConfig(32, 1))
    prompt = range(1, 34)
    harness.add(make_sequence(prompt, max_tokens=1))
    harness.run()
    first, second = streams = [make_sequence(prompt, max_tokens=40) for _ in range(2)]
    harness.add(*streams)
    harness.step()
    # The eight blocks that both share may be wrong: who comes next computes its own, and leaves them to be found.
    harness.scheduler._blocks.hide(first)
    harness.add(make_sequence(prompt, max_tokens=1))
    harness.step()
    # This one needs five: of those to be found there are five left, or seven, or all.
    harness.add(newcomer := make_sequence(20, max_tokens=4))
    harness.schedule()
    harness.lose()
    # The first one that restarts begins behind what is found. When it has to give way, the second one finds room.
    assert (first.status is SequenceStatus.RUNNING) is restarts
    assert second.status is SequenceStatus.RUNNING
    harness.run_to_reference(*streams, newcomer)


@pytest.mark.parametrize(("num_tokens", "num_preempted"), [(23, 2), (27, 3), (31, 0)])
def test_blocks_that_others_share_make_no_room(num_tokens: int, num_preempted: int) -> None:
    harness = Harness(num_blocks=16, max_num_seqs=6, max_num_batched_tokens=64, headroom_tokens=0)
    prompt = range(1, 34)
    harness.add(make_sequence(prompt, max_tokens=1, tenant="greedy"))
    harness.run()
    greedy = [make_sequence(prompt, max_tokens=3, tenant="greedy") for _ in range(4)]
    harness.add(*greedy)
    harness.step()
    # They share eight blocks and have one more each; four blocks are free. The first one is never preempted.
    waiting = make_sequence(num_tokens, max_tokens=1, tenant="polite")
    small = make_sequence(2, max_tokens=1, tenant="greedy")
    harness.add(waiting, small)
    harness.scheduler._live.waiting["interactive"].counters.tenants.account("polite").counter = -1.0
    harness.step()
    assert [sequence.num_preemptions for sequence in greedy] == [0] * (4 - num_preempted) + [1] * num_preempted
    assert (waiting.id in harness.finish) is (num_preempted > 0)
    harness.run_to_reference(*greedy, waiting, small)


def test_first_of_a_key_is_not_taken_for_another_that_was_preempted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(num_blocks=10, max_num_seqs=8)
    greedy = [parts.run(7, tenant="greedy", max_tokens=1) for _ in range(5)]
    monkeypatch.setattr(parts.blocks, "helpful", lambda _, victims: victims)
    parts.wait(15, tenant="polite", max_tokens=1, arrival=1e6)
    small = parts.wait(2, tenant="greedy", max_tokens=1, arrival=2e6)
    for _ in range(3):
        parts.admission.admit_interactive(0.0)
        parts.live.check_integrity()
    assert greedy[4].num_preemptions
    assert small.status is SequenceStatus.WAITING
