"""Random lives of a scheduler whose layers have windows or states, or whose sequences have KV budgets.

After every step the runner reads back which tokens a sequence keeps, and to which places their keys are turned.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from gpu_worker.core.block_budget import BlockBudget
from gpu_worker.core.scheduler_config import WindowConfig
from gpu_worker.core.step import ScheduledStep
from tests.gpu_worker.core.harness import BLOCK
from tests.gpu_worker.core.paged_oracle import reference_tokens
from tests.gpu_worker.core.sequences import EOS, limit, make_sequence
from tests.gpu_worker.core.test_scheduler_properties import (
    POOL,
    SIZES,
    VOCAB_SIZE,
    SchedulerMachine,
    drafts,
    lanes,
    prompts,
)

budgets = st.sampled_from(
    [
        BlockBudget(4, 1, 1, BLOCK),
        BlockBudget(5, 1, 2, BLOCK),
        BlockBudget(8, 2, 3, BLOCK),
        BlockBudget(12, 1, 1, BLOCK),
        BlockBudget(5, 1, 1, BLOCK, "heavy_hitters", 2),
        BlockBudget(8, 2, 2, BLOCK, "persistence", 2),
    ]
)


class EvictingMachine(SchedulerMachine):
    # What a sequence has forgotten was computed for it, too: four with the least budget (three blocks and one that
    # fills) share the pool, and each has 34 + 90 tokens at most.
    max_input = 34 + 90
    max_running = POOL // 3 * (34 + 90)

    @rule(
        prompt=prompts,
        budget=budgets,
        num_emitted=st.sampled_from([0, 0, 1, 9, 30]),
        max_tokens=st.integers(1, 90),
        request=st.fixed_dictionaries(
            {
                "lane": lanes,
                "tenant": st.sampled_from(["a", "a", "b"]),
                "ignore_eos": st.booleans(),
                "prompt_logprobs": st.sampled_from([None, None, 0]),
            }
        ),
    )
    def add_budgeted(
        self, prompt: list[int], budget: BlockBudget, num_emitted: int, max_tokens: int, request: dict[str, Any]
    ) -> None:
        stop_ids = frozenset() if request["ignore_eos"] else frozenset([EOS])
        emitted, _ = reference_tokens(b"a", prompt, min(num_emitted, max_tokens), stop_ids, VOCAB_SIZE)
        sequence = make_sequence(prompt, emitted=emitted, max_tokens=max_tokens, salt=b"a", **request)
        limit(sequence, budget)
        if sequence.num_prompt_tokens < self.scheduler.config.max_model_len:
            self.sequences.append(sequence)
            self.harness.add(sequence)
            self.scheduler.check_integrity()

    def _check_lanes(self, plan: ScheduledStep) -> None:
        """Do not count what waiting sequences need: it depends on their budgets."""

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            while self.scheduler.has_work():
                self.step(1)
            # What fails a second time just when its keys are to turn is not computed a third time.
            self.failed |= {sequence.id for sequence in self.sequences if sequence.has_lost_eviction}
        super().teardown()


class TestEvictingMachine(EvictingMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.slow
class TestEvictingMachineAtLength(EvictingMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)


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
