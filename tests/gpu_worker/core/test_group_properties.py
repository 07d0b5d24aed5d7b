"""Random lives of a scheduler whose layers have windows or states."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from gpu_worker.core.scheduler_config import WindowConfig
from tests.gpu_worker.core.harness import BLOCK
from tests.gpu_worker.core.test_scheduler_properties import SIZES, SchedulerMachine, drafts


def windows(*choices: tuple[int, ...], slack: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[WindowConfig, ...]]:
    """Groups with the fewest blocks that a sequence needs, and some more."""

    def groups(choice: tuple[int, ...], more: int) -> tuple[WindowConfig, ...]:
        return tuple(WindowConfig(size, WindowConfig(size, 0).most_blocks(BLOCK) + more) for size in choice)

    return st.builds(groups, st.sampled_from(choices), slack)


class GroupMachine(SchedulerMachine):
    @initialize(
        sizes=st.fixed_dictionaries(
            {
                **SIZES,
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "policy": drafts(None, None, 0.5, 0.9),
                "windows": windows((), (5,), (8,), (1,), (3, 13), slack=st.integers(0, 10)),
                "interval": st.sampled_from([None, 1, 2, 4]),
                "slot_slack": st.integers(0, 8),
            }
        )
    )
    def start(self, sizes: dict[str, Any]) -> None:
        self._start(**sizes)

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
class TestGroupMachineAtLength(GroupMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=40)
