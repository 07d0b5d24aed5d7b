"""Random lives of a small scheduler whose model has further groups: layers with windows, recurrent layers, or both.

The oracle reads every window through its own table, and every state from its own slot.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from gpu_worker.core.scheduler_config import StateConfig, WindowConfig
from gpu_worker.core.step import ScheduledStep
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.service_oracle import ServiceOracle
from tests.gpu_worker.core.test_scheduler_properties import POOL, VOCAB_SIZE, RandomDrafts, SchedulerMachine


class GroupMachine(SchedulerMachine):
    @initialize(
        max_num_seqs=st.integers(1, 5),
        slack=st.integers(0, 12),
        caching=st.sampled_from([True, True, False]),
        headroom=st.sampled_from([0, 4, 128]),
        max_steps_in_flight=st.sampled_from([1, 2, 2, 3]),
        drafting=st.sampled_from([None, None, 0.5, 0.9]),
        draft_seed=st.integers(0, 1000),
        windows=st.sampled_from([(), (5,), (8,), (1,), (3, 13)]),
        window_slack=st.integers(0, 10),
        interval=st.sampled_from([None, 1, 2, 4]),
        slot_slack=st.integers(0, 8),
    )
    def start(  # type: ignore[override]
        self,
        max_num_seqs: int,
        slack: int,
        caching: bool,
        headroom: int,
        max_steps_in_flight: int,
        drafting: float | None,
        draft_seed: int,
        windows: tuple[int, ...],
        window_slack: int,
        interval: int | None,
        slot_slack: int,
    ) -> None:
        drafts = None if drafting is None else RandomDrafts(draft_seed, drafting)
        least = [WindowConfig(window, 0).most_blocks(BLOCK) for window in windows]
        self.harness = Harness(
            num_blocks=POOL,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + slack,
            enable_prefix_caching=caching,
            headroom_tokens=headroom,
            vocab_size=VOCAB_SIZE,
            max_steps_in_flight=max_steps_in_flight,
            policy=drafts,
            drafter=None if drafts is None else drafts.draft,
            windows=tuple(
                WindowConfig(window, count + window_slack) for window, count in zip(windows, least, strict=True)
            ),
            state=None if interval is None else StateConfig(max_num_seqs + slot_slack, interval),
        )
        self.scheduler = self.harness.scheduler
        self.sequences, self.aborted, self.failed, self.rolled_back = [], set(), set(), set()
        self.service = ServiceOracle(lambda sequence: sequence.tenant)

    def _check_people_first(self, plan: ScheduledStep) -> None:
        """People may have to wait for blocks of windows, which batch work does not take from them."""

    def _check_lanes(self, plan: ScheduledStep) -> None:
        """That is counted by group."""

    def _check_after_step(self) -> None:
        super()._check_after_step()
        if self.harness.in_flight or self.rolled_back:
            return
        for sequence in self.sequences:
            for group, table in zip(self.scheduler.config.windows, sequence.window_tables, strict=False):
                assert table.num_held <= group.most_blocks(BLOCK), "more than the window and one block is held"


class TestGroupMachine(GroupMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestGroupMachineAtLength(GroupMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)
