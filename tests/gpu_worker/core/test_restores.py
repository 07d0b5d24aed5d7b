"""Random lives of a small scheduler with tiers below its pools: tokens are those of a contiguous model all the same."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from gpu_worker.core.scheduler_config import StateConfig, WindowConfig
from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.core.step import SampledTokens, ScheduledStep, StepResult
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.oracle_tiers import OracleTiers
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.core.test_scheduler_properties import POOL, VOCAB_SIZE, SchedulerMachine


class TieredMachine(SchedulerMachine):
    @initialize(
        max_num_seqs=st.integers(1, 5),
        slack=st.integers(0, 12),
        headroom=st.sampled_from([0, 4, 128]),
        max_steps_in_flight=st.sampled_from([1, 2, 3]),
        windows=st.sampled_from([(), (5,), (3, 13)]),
        interval=st.sampled_from([None, 1, 2]),
        slot_slack=st.integers(0, 6),
        seed=st.integers(0, 1000),
    )
    def start(  # type: ignore[override]
        self,
        max_num_seqs: int,
        slack: int,
        headroom: int,
        max_steps_in_flight: int,
        windows: tuple[int, ...],
        interval: int | None,
        slot_slack: int,
        seed: int,
    ) -> None:
        self.tiers = OracleTiers(seed, len(windows))
        least = [WindowConfig(window, 0).most_blocks(BLOCK) for window in windows]
        self.harness = Harness(
            num_blocks=POOL,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + slack,
            headroom_tokens=headroom,
            vocab_size=VOCAB_SIZE,
            max_steps_in_flight=max_steps_in_flight,
            windows=tuple(WindowConfig(window, count + 3) for window, count in zip(windows, least, strict=True)),
            state=None if interval is None else StateConfig(max_num_seqs + slot_slack, interval),
            tiers=self.tiers,
        )
        self.tiers.runner = self.harness.runner
        self.scheduler = self.harness.scheduler
        self.sequences, self.aborted, self.failed, self.rolled_back = [], set(), set(), set()

    @rule(prompt=st.sampled_from([3, 4]), length=st.integers(9, 30))
    def return_after_others(self, prompt: int, length: int) -> None:
        """A long prompt comes, other texts overwrite it, and it comes again."""
        for token_ids in ([prompt] * length, [7] * 40, [8] * 40, [prompt] * length):
            self._add(make_sequence(token_ids, salt=b"a", max_tokens=2))
            self.step(4)

    @rule(count=st.integers(1, 4))
    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.tiers.tick()

    def _submitted(self) -> bool:
        self.tiers.tick()
        self.harness.now += 1.0
        is_idle = not self.harness.in_flight
        plan = self.harness.try_schedule()
        self.scheduler.check_integrity()
        if plan is None:
            assert not is_idle, "nothing is in flight that could land first"
            return False
        self._check_budget(plan)
        self._check_people_first(plan)
        self._check_lanes(plan)
        has_work = self._with(SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
        if has_work and not self.scheduler._live.num_restoring:
            assert plan.scheduled, "there is work, and nothing is scheduled"
        return bool(plan.scheduled)

    def _check_people_first(self, plan: ScheduledStep) -> None:
        """Nor is it so with people whose prefixes are loaded."""
        if not self.scheduler._live.num_restoring:
            super()._check_people_first(plan)

    def _check_lanes(self, plan: ScheduledStep) -> None:
        """Blocks that are being loaded into are held beside."""
        if not self.scheduler._live.num_restoring:
            super()._check_lanes(plan)


class TestTieredMachine(TieredMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestTieredMachineAtLength(TieredMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)


def test_a_prefix_that_was_overwritten_is_loaded() -> None:
    tiers = OracleTiers(1, 0)
    tiers.random.random = lambda: 0.5  # type: ignore[method-assign]
    harness = Harness(num_blocks=12, tiers=tiers)
    tiers.runner = harness.runner
    sequences = [make_sequence([number] * 30, max_tokens=2) for number in (3, 7, 8)]
    for sequence in sequences:
        harness.add(sequence)
        harness.run()
    again = make_sequence([3] * 30, max_tokens=2)
    harness.add(again)
    while harness.scheduler.has_work():
        tiers.tick()
        harness.step()
    harness.assert_reference(*sequences, again)
    assert again.num_cached_tokens == 28
    assert tiers.num_loaded == 7


def test_a_load_that_is_stuck_suspends_the_tiers_once() -> None:
    tiers = OracleTiers(1, 0)
    tiers.random.random = lambda: 0.5  # type: ignore[method-assign]
    harness = Harness(num_blocks=12, tiers=tiers)
    tiers.runner = harness.runner
    sequences = [make_sequence([number] * 30, max_tokens=2) for number in (3, 7, 8)]
    for sequence in sequences:
        harness.add(sequence)
        harness.run()
    tiers.random.random = lambda: 0.12  # type: ignore[method-assign]
    again = make_sequence([3] * 30, max_tokens=2)
    harness.add(again)
    while harness.scheduler.has_work():
        harness.now += 0.4
        harness.step()
    harness.assert_reference(*sequences, again)
    assert (len(tiers.loads), tiers.num_loaded, again.num_cached_tokens) == (1, 0, 0)
    assert tiers.num_suspensions == 1


def test_what_a_sequence_with_an_error_has_left_is_dropped_everywhere() -> None:
    tiers = OracleTiers(1, 0)
    harness = Harness(tiers=tiers)
    tiers.runner = harness.runner
    sequence = make_sequence([5] * 14, max_tokens=4)
    harness.add(sequence)
    harness.step()
    plan = harness.schedule()
    assert any(tiers.has(0, digest) for digest in sequence.block_digests)
    harness.in_flight.clear()
    harness.scheduler.settle(plan, StepResult(plan.step, [SampledTokens(error="no numbers")]))
    tiers.flush()
    assert not any(tiers.has(0, digest) for digest in sequence.block_digests)
