"""Random lives of a small scheduler with tiers below its pools: tokens are those of a contiguous model all the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, ScheduledStep, StepResult
from tests.gpu_worker.core.harness import Harness
from tests.gpu_worker.core.oracle_tiers import OracleTiers
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.core.test_group_properties import windows
from tests.gpu_worker.core.test_scheduler_properties import SIZES, SchedulerMachine


class TieredMachine(SchedulerMachine):
    @initialize(
        sizes=st.fixed_dictionaries(
            {
                **SIZES,
                "windows": windows((), (5,), (3, 13), slack=st.just(3)),
                "interval": st.sampled_from([None, 1, 2]),
                "slot_slack": st.integers(0, 6),
            }
        ),
        seed=st.integers(0, 1000),
    )
    def start(self, sizes: dict[str, Any], seed: int) -> None:  # type: ignore[override]
        self.tiers = OracleTiers(seed, len(sizes["windows"]))
        self._start(**sizes, tiers=self.tiers)
        self.tiers.runner = self.harness.runner

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
        self.was_restoring = self._is_restoring
        return super()._submitted()

    @property
    def _is_restoring(self) -> bool:
        return bool(self.scheduler._live.num_restoring)

    def _check_order(self, waiting_before: list[Sequence]) -> None:
        """Others may start before a sequence whose prefix is being restored."""
        if not (self.was_restoring or self._is_restoring):
            super()._check_order(waiting_before)

    def _check_service(self, plan: ScheduledStep) -> None:
        """A tenant whose sequence is being restored does not compete; the comparison begins anew afterwards."""
        if self.was_restoring or self._is_restoring:
            self.service.serves(plan)
            self.service.waits([])
        else:
            super()._check_service(plan)


class TestTieredMachine(TieredMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.slow
class TestTieredMachineAtLength(TieredMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40)


def overwritten() -> tuple[Harness, OracleTiers, list[Sequence]]:
    """Return an engine whose blocks of the first of three sequences, of threes, were overwritten."""
    tiers = OracleTiers(1, 0)
    tiers.random.random = lambda: 0.5  # type: ignore[method-assign]
    harness = Harness(num_blocks=12, tiers=tiers)
    tiers.runner = harness.runner
    sequences = [make_sequence([number] * 30, max_tokens=2) for number in (3, 7, 8)]
    for sequence in sequences:
        harness.add(sequence)
        harness.run()
    return harness, tiers, sequences


def test_a_prefix_that_was_overwritten_is_loaded() -> None:
    harness, tiers, sequences = overwritten()
    harness.add(again := make_sequence([3] * 30, max_tokens=2))
    while harness.scheduler.has_work():
        tiers.tick()
        harness.step()
    harness.assert_reference(*sequences, again)
    assert again.num_cached_tokens == 28
    assert tiers.num_loaded == 7


def test_a_prefix_that_was_overwritten_while_its_sequence_was_preempted_is_loaded_again() -> None:
    harness, tiers, _ = overwritten()
    harness.add(again := make_sequence([3] * 30, max_tokens=4))
    while not again.num_output_tokens:
        tiers.tick()
        harness.step()
    harness.scheduler._blocks.pool.unlabel(again.block_table)
    harness.scheduler._live.preempt(again)
    while harness.scheduler.has_work():
        tiers.tick()
        harness.step()
    harness.assert_reference(again)
    assert tiers.num_loaded == 14
    # What it says to have found is what it found when it came.
    stats = harness.scheduler.stats
    assert (again.num_cached_tokens, stats.num_prefix_queries, stats.num_prefix_hits) == (28, 120, 28)


def test_a_load_that_is_stuck_suspends_the_tiers_once() -> None:
    harness, tiers, sequences = overwritten()
    tiers.random.random = lambda: 0.12  # type: ignore[method-assign]
    harness.add(again := make_sequence([3] * 30, max_tokens=2))
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
    harness.add(sequence := make_sequence([5] * 14, max_tokens=4))
    harness.step()
    plan = harness.schedule()
    assert any(tiers.has(0, digest) for digest in sequence.block_digests)
    harness.in_flight.clear()
    harness.scheduler.settle(plan, StepResult(plan.step, [SampledTokens(error="no numbers")]))
    tiers.flush()
    assert not any(tiers.has(0, digest) for digest in sequence.block_digests)
