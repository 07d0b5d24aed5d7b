import pytest

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.step import ScheduledStep
from tests.gpu_worker.core.harness import BLOCK, Harness, StepCost
from tests.gpu_worker.core.sequences import make_sequence


def shares(plan: ScheduledStep) -> list[tuple[str, int]]:
    return [(item.sequence.id, item.num_tokens) for item in plan.scheduled]


def test_long_prompt_is_computed_in_chunks_and_never_delays_a_decode() -> None:
    harness = Harness(max_num_batched_tokens=16)
    stream, prompt = make_sequence(4, max_tokens=50), make_sequence(100, max_tokens=1)
    harness.add(stream)
    harness.step()
    harness.add(prompt)
    for chunk in (15, 15, 15, 15, 15, 15, 10):
        plan = harness.schedule()
        assert shares(plan) == [(stream.id, 1), (prompt.id, chunk)]
        assert next(event.sequence for event in harness.settle(plan)) is stream
    assert harness.finish[prompt.id] == "length"


def test_prompts_share_the_budget_in_order_of_priority_then_arrival() -> None:
    harness = Harness(max_num_batched_tokens=16)
    later, first = make_sequence(10, arrival=2), make_sequence(10, arrival=1)
    urgent = make_sequence(10, arrival=60, priority=1)
    harness.add(later, first, urgent)
    assert shares(harness.schedule()) == [(urgent.id, 10), (first.id, 6)]


def test_sequence_that_the_budget_does_not_reach_is_not_started() -> None:
    harness = Harness(max_num_batched_tokens=16)
    first, second = make_sequence(16), make_sequence(4)
    harness.add(first, second)
    harness.schedule()
    assert (first.status, second.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    assert second.block_table == []


def test_nobody_starts_in_a_step_that_a_longer_prompt_fills() -> None:
    harness = Harness(max_num_batched_tokens=16)
    long, second = make_sequence(40), make_sequence(4)
    harness.add(long)
    harness.step()
    harness.add(second)
    assert shares(harness.schedule()) == [(long.id, 16)]
    assert (second.status, second.block_table) == (SequenceStatus.WAITING, [])


def test_batch_prompts_of_a_step_that_was_undone_share_the_budget_again() -> None:
    harness = Harness(max_num_batched_tokens=16)
    first, second = (make_sequence(10, lane="batch") for _ in range(2))
    harness.add(first, second)
    harness.schedule()
    harness.lose()
    assert shares(harness.schedule()) == [(first.id, 10), (second.id, 6)]


def test_step_that_is_planned_again_says_how_many_of_its_shares_are_decodes() -> None:
    harness = Harness(max_num_batched_tokens=16)
    streams, prompt = [make_sequence(4, max_tokens=50) for _ in range(2)], make_sequence(10)
    harness.add(*streams)
    harness.step()
    harness.add(prompt)
    plan = harness.schedule()
    again = harness.schedule_again(harness.lose())
    assert again is not None
    assert shares(again) == [*((stream.id, 1) for stream in streams), (prompt.id, 10)]
    assert again.num_decodes == plan.num_decodes == 2


def test_batch_prompt_that_needs_one_step_may_fill_the_whole_budget_but_gets_no_part_of_it() -> None:
    for num_tokens_of_a_person, expected in ((0, 16), (1, 0)):
        harness = Harness(max_num_batched_tokens=16)
        whole = make_sequence(16, lane="batch", max_tokens=0)
        whole.pooling = PoolingPlan("mean", is_whole=True)
        harness.add(whole)
        if num_tokens_of_a_person:
            harness.add(make_sequence(num_tokens_of_a_person))
        assert dict(shares(harness.schedule())).get(whole.id, 0) == expected


def test_sequences_start_in_order_of_arrival_when_slots_are_few() -> None:
    harness = Harness(max_num_seqs=1)
    sequences = [make_sequence(3, max_tokens=1) for _ in range(5)]
    harness.add(*reversed(sequences))
    harness.run()
    assert list(harness.finish) == [sequence.id for sequence in sequences]


def test_admission_waits_for_blocks_and_passes_nobody_by() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    holder, large, small = make_sequence(40, max_tokens=8), make_sequence(60, max_tokens=4), make_sequence(2)
    harness.add(holder, large, small)
    assert shares(harness.schedule()) == [(holder.id, 40)]
    assert (large.status, small.status) == (SequenceStatus.WAITING, SequenceStatus.WAITING)


def test_admission_keeps_headroom_for_what_runs() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    holder, newcomer = make_sequence(8, max_tokens=40), make_sequence(20, max_tokens=20)
    harness.add(holder, newcomer)
    assert shares(harness.schedule()) == [(holder.id, 8)]
    harness = Harness(num_blocks=22, max_num_batched_tokens=100)
    harness.add(make_sequence(8, max_tokens=40), make_sequence(20, max_tokens=20))
    assert len(harness.schedule().scheduled) == 2
    harness.scheduler.check_integrity()


def test_outgrowing_the_pool_preempts_the_latest_which_then_continues_identically() -> None:
    harness = Harness(num_blocks=70, max_num_batched_tokens=64)
    sequences = [make_sequence(4, max_tokens=200) for _ in range(3)]
    harness.add(*sequences)
    harness.run_to_reference(*sequences)
    # The first two fit with their headroom and outgrow the pool later; the third has to wait from the start.
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1, 0]
    assert harness.scheduler.stats.num_preemptions == 1


def test_preempted_sequence_finds_its_own_blocks_again() -> None:
    harness = Harness(num_blocks=40, max_num_seqs=1, max_num_batched_tokens=64)
    harness.add(background := make_sequence(40, max_tokens=30, lane="batch"))
    harness.step()
    harness.add(make_sequence(4, max_tokens=1))
    plan = harness.schedule()
    assert plan.departed == [background]
    harness.settle(plan)
    plan = harness.schedule()
    assert [(item.sequence.id, item.start, item.num_tokens) for item in plan.scheduled] == [(background.id, 40, 1)]
    assert background.num_cached_tokens == 0
    harness.settle(plan)
    harness.run_to_reference(background)


def test_interactive_takes_a_batch_slot_within_one_step() -> None:
    harness = Harness(max_num_seqs=2)
    older, newer = (make_sequence(4, max_tokens=50, lane="batch") for _ in range(2))
    harness.add(older, newer)
    harness.step()
    harness.add(person := make_sequence(4))
    plan = harness.schedule()
    assert plan.departed == [newer]
    assert [item.sequence for item in plan.scheduled] == [older, person]
    harness.settle(plan)
    harness.run_to_reference(older, newer, person)


def test_interactive_takes_batch_blocks_within_one_step() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    harness.add(background := make_sequence(40, max_tokens=20, lane="batch"))
    harness.step()
    harness.add(person := make_sequence(50, max_tokens=4))
    plan = harness.schedule()
    assert plan.departed == [background]
    assert shares(plan) == [(person.id, 50)]
    harness.settle(plan)
    harness.run_to_reference(background, person)


def test_batch_is_left_alone_when_its_blocks_would_not_be_enough() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    holder, background = make_sequence(40, max_tokens=4), make_sequence(8, max_tokens=4, lane="batch")
    harness.add(holder, background)
    harness.step()
    harness.add(make_sequence(60, max_tokens=4))
    assert harness.schedule().departed == []


def test_batch_does_not_start_while_interactive_waits() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    harness.add(make_sequence(40, max_tokens=4))
    harness.step()
    harness.add(make_sequence(60, max_tokens=4), make_sequence(4, lane="batch", priority=100))
    assert len(harness.schedule().scheduled) == 1


def test_interactive_prompt_gets_the_budget_before_a_batch_prompt_that_started_earlier() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.add(make_sequence(100, lane="batch"))
    harness.step()
    harness.add(person := make_sequence(20))
    assert shares(harness.schedule()) == [(person.id, 16)]


def test_shared_prefix_is_computed_once() -> None:
    harness = Harness(max_num_batched_tokens=64)
    first, second = make_sequence(range(100, 130)), make_sequence([*range(100, 125), 7, 7, 7])
    harness.add(first)
    harness.step()
    harness.add(second)
    plan = harness.schedule()
    assert shares(plan) == [(first.id, 1), (second.id, 28 - 24)]
    assert second.num_cached_tokens == 24
    harness.settle(plan)
    harness.run_to_reference(first, second)
    assert (harness.scheduler.stats.num_prefix_hits, harness.scheduler.stats.num_prefix_queries) == (24, 58)


def test_moved_sequence_tells_only_tokens_of_its_prompt_as_cached() -> None:
    harness = Harness(max_num_batched_tokens=64)
    harness.add(first := make_sequence(10, max_tokens=30))
    harness.run()
    harness.add(moved := make_sequence(first.token_ids[:10], emitted=first.token_ids[10:25], max_tokens=30))
    harness.run_to_reference(moved)
    assert moved.num_cached_tokens == 10
    assert (harness.scheduler.stats.num_prefix_hits, harness.scheduler.stats.num_prefix_queries) == (10, 20)


def test_output_of_a_running_sequence_is_findable_as_its_blocks_fill() -> None:
    harness = Harness(max_num_batched_tokens=64)
    harness.add(first := make_sequence(6, max_tokens=100))
    for _ in range(8):
        harness.step()
    harness.add(follow_up := make_sequence([*first.token_ids, 7, 7]))
    plan = harness.schedule()
    assert first.status is SequenceStatus.RUNNING
    assert follow_up.num_cached_tokens == (len(first.token_ids) - 1) // BLOCK * BLOCK == 12
    harness.settle(plan)
    harness.run_to_reference(first, follow_up)


def test_blocks_shared_with_a_running_sequence_are_not_counted_twice_at_admission() -> None:
    harness = Harness(num_blocks=16, max_num_batched_tokens=100)
    first, second = make_sequence(range(100, 140), max_tokens=4), make_sequence(range(100, 142), max_tokens=4)
    harness.add(first)
    harness.step()
    harness.add(second)
    assert shares(harness.schedule()) == [(first.id, 1), (second.id, 2)]


def test_disabled_prefix_cache_finds_nothing() -> None:
    harness = Harness(max_num_batched_tokens=64, enable_prefix_caching=False)
    sequences = [make_sequence(range(100, 130)) for _ in range(2)]
    for sequence in sequences:
        harness.add(sequence)
        harness.run()
    assert harness.scheduler.stats.num_prefix_hits == 0
    harness.assert_reference(*sequences)


def test_blocks_being_computed_are_not_findable_before_the_step_settled() -> None:
    harness = Harness(max_num_batched_tokens=64)
    first, second = make_sequence(range(100, 120)), make_sequence(range(100, 120))
    harness.add(first, second)
    assert shares(harness.schedule()) == [(first.id, 20), (second.id, 20)]


@pytest.mark.parametrize("depth", [1, 2])
def test_block_whose_last_token_was_sampled_but_not_computed_is_not_findable(depth: int) -> None:
    harness = Harness(max_steps_in_flight=depth)
    harness.add(first := make_sequence(BLOCK - 1))
    harness.step()
    assert first.num_output_tokens == 1
    harness.scheduler.abort(first.id)
    while harness.in_flight:
        # The step that would have written the token's KV.
        harness.lose()
    harness.add(follow_up := make_sequence([*first.token_ids, 7]))
    assert shares(harness.schedule()) == [(follow_up.id, BLOCK + 1)]
    assert follow_up.num_cached_tokens == 0


def test_resumed_sequence_catches_up_with_a_budget_of_one_token() -> None:
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=1)
    harness.add(whole := make_sequence(range(100, 103), max_tokens=6))
    harness.run()
    harness.add(resumed := make_sequence(range(100, 103), emitted=harness.output[whole.id][:4], max_tokens=6))
    harness.run_to_reference(whole, resumed)
    assert harness.output[resumed.id] == harness.output[whole.id]


CPU = StepCost(0.75e-3, 0.18e-3, 0.06e-3)


def test_prompt_of_a_person_gets_the_budget_before_batch_decodes() -> None:
    harness = Harness(max_num_seqs=8, max_num_batched_tokens=8, num_blocks=256)
    background = [make_sequence(1, lane="batch", max_tokens=100) for _ in range(7)]
    harness.add(*background)
    harness.step()
    assert all(sequence.num_output_tokens == 1 for sequence in background)
    harness.add(person := make_sequence(100, max_tokens=4))
    num_steps = 0
    while person.num_output_tokens == 0:
        harness.step()
        num_steps += 1
        harness.scheduler.check_integrity()
    assert num_steps == 13
    harness.run_to_reference(person, *background)


def test_batch_decodes_are_paused_with_their_blocks_while_a_person_sets_the_pace() -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=512, cost=CPU)
    background = [make_sequence(20, lane="batch", max_tokens=60) for _ in range(8)]
    harness.add(*background)
    for _ in range(6):
        harness.step()
    before = {s: (list(s.block_table), s.num_tokens) for s in background}
    harness.add(person := make_sequence(4, max_tokens=50))
    while person.id not in harness.finish:
        plan = harness.schedule()
        assert shares(plan)[0][0] == person.id
        assert len(plan.scheduled) == 1
        assert plan.is_throttled
        harness.settle(plan)
        harness.scheduler.check_integrity()
    assert {s: (s.block_table, s.num_tokens) for s in background} == before
    assert [sequence.num_preemptions for sequence in background] == [0] * 8
    harness.run_to_reference(person, *background)


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_batch_goes_on_beside_a_person_who_never_stops(depth: int) -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=2000, cost=CPU, max_steps_in_flight=depth)
    harness.add(person := make_sequence(4, max_tokens=4500, ignore_eos=True))
    harness.step()
    background = [make_sequence(20, lane="batch", max_tokens=2, ignore_eos=True) for _ in range(3)]
    harness.add(*background)
    while person.id not in harness.finish:
        harness.step()
    assert all(sequence.id in harness.finish for sequence in background)
    num_mixed = sum(len(plan.scheduled) > 1 for plan in harness.runner.plans)
    assert num_mixed <= 4500 // 1000
    harness.run_to_reference(person, *background)


def test_machine_is_filled_again_when_people_have_been_away_for_a_while() -> None:
    harness = Harness(max_num_seqs=64, max_num_batched_tokens=256, num_blocks=4000, cost=CPU)
    background = [make_sequence(4, lane="batch", max_tokens=400, ignore_eos=True) for _ in range(64)]
    harness.add(make_sequence(4, max_tokens=20), *background)
    num_batch = []
    for _ in range(60):
        plan = harness.schedule()
        num_batch.append(sum(item.sequence.lane == "batch" for item in plan.scheduled))
        harness.settle(plan)
        harness.now += 0.5
    # The person's steps are half a second apart, so they have left after two seconds and a half of that.
    ended = next(step for step, count in enumerate(num_batch) if step and count == 1 and num_batch[step - 1] == 0)
    assert num_batch[ended : ended + 2] == [1, 1]
    assert num_batch[ended + 3] > 40


def test_only_what_can_run_soon_is_started_of_the_batch_lane() -> None:
    harness = Harness(max_num_seqs=64, max_num_batched_tokens=256, num_blocks=4000, cost=CPU)
    harness.add(make_sequence(4, max_tokens=300, ignore_eos=True))
    harness.step()
    harness.add(*[make_sequence(4, lane="batch", max_tokens=10) for _ in range(50)])
    for _ in range(100):
        harness.step()
    # What the few first long steps hold, which are to tell what batch work takes.
    assert harness.scheduler.stats.running_batch <= harness.scheduler.stats.max_batch_seqs
    assert harness.scheduler.stats.waiting_batch >= 50 - harness.scheduler.stats.max_batch_seqs


def test_batch_drafts_nothing_while_people_set_the_pace() -> None:
    class Deep:
        def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
            return True

        def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
            return [min(3, limit) for limit in limits]

        def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None: ...

        def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None: ...

    gpu = StepCost(6e-3, 0.03e-3, 0.03e-3)
    harness = Harness(cost=gpu, policy=Deep(), drafter=lambda right: right, batch_slowdown=0.5)
    person, background = make_sequence(4, max_tokens=40), make_sequence(4, max_tokens=40, lane="batch")
    harness.add(background)
    harness.step()
    plan = harness.schedule()
    assert [item.num_draft_tokens for item in plan.scheduled] == [3]
    harness.settle(plan)
    harness.add(person)
    depths = []
    while person.id not in harness.finish:
        plan = harness.schedule()
        depths += [(item.sequence.lane, item.num_draft_tokens) for item in plan.scheduled[: plan.num_decodes]]
        harness.settle(plan)
    assert ("interactive", 3) in depths
    assert {depth for lane, depth in depths if lane == "batch"} == {0}
    harness.run_to_reference(person, background)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_num_seqs", [8, 5])
def test_trial_beside_people_takes_no_longer_for_the_batch_work_that_runs_there(depth: int, max_num_seqs: int) -> None:
    # A batch sequence costs as much as all people's: none is computed but in long steps, which have room for two.
    harness = Harness(
        num_blocks=2000,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_steps_in_flight=depth,
        cost=StepCost(0.001, 0.001, 0.0001),
    )
    # The prompt of the last one is not computed yet when people come.
    batch = [make_sequence(length, max_tokens=40, lane="batch") for length in (40, 40, 40, 1000)]
    harness.add(*batch)
    for _ in range(10):
        harness.step()
    harness.add(person := make_sequence(8, max_tokens=5000))
    for _ in range(100):
        harness.step()
    suspect = make_sequence(20, max_tokens=100, lane="batch")
    suspect.trial_end = len(suspect.token_ids) + 4
    harness.add(suspect)
    others = [sequence.num_computed_tokens for sequence in batch]
    num_steps = 0
    while suspect.is_on_trial:
        harness.step()
        num_steps += 1
    # The tokens of its prompt that fit into a long step are 16 or more.
    assert num_steps <= (2 + 4) * 201
    # None was computed further; one that made way for the suspect has lost what it had.
    assert all(sequence.num_computed_tokens in (0, before) for sequence, before in zip(batch, others, strict=True))
    harness.scheduler.abort(person.id)
    harness.run_to_reference(*batch, suspect)


def test_decode_that_stays_one_keeps_its_place_in_steps() -> None:
    harness = Harness()
    streams = [make_sequence(4, max_tokens=50) for _ in range(3)]
    harness.add(*streams)
    harness.step()
    harness.scheduler._live.running.reclassify(streams[0])
    assert shares(harness.schedule()) == [(stream.id, 1) for stream in streams]
