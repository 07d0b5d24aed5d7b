"""Random lives of a scheduler whose sequences have KV budgets.

After every step the runner reads back which tokens a sequence keeps, and to which places their keys are turned.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from gpu_worker.core.block_budget import BlockBudget
from gpu_worker.core.step import ScheduledStep
from tests.gpu_worker.core.harness import BLOCK
from tests.gpu_worker.core.paged_oracle import reference_tokens
from tests.gpu_worker.core.sequences import EOS, limit, make_sequence
from tests.gpu_worker.core.test_scheduler_properties import (
    POOL,
    VOCAB_SIZE,
    SchedulerMachine,
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


def test_step_may_fail_that_evicts_for_a_sequence_of_the_next_one_alone() -> None:
    """The steps behind it are computed, and their results are dropped."""
    life = EvictingMachine()
    sizes = {"max_num_seqs": 5, "slack": 1, "headroom_tokens": 0, "max_steps_in_flight": 2, "max_model_len": 40}
    life.start(sizes=sizes | {"enable_prefix_caching": False, "policy": None, "cost": None})
    request = {"lane": "interactive", "tenant": "a", "ignore_eos": False, "prompt_logprobs": None}
    life.add_budgeted(prompt=[3], budget=BlockBudget(4, 1, 1, BLOCK), num_emitted=0, max_tokens=1, request=request)
    life.failing_step_that_nobody_computes_again()
    life.add_resumed(lane="interactive", max_tokens=1, num_emitted=1, prompt=[3])
    budget = BlockBudget(5, 1, 1, BLOCK, "heavy_hitters", 2)
    life.add_budgeted(prompt=[3] * 17, budget=budget, num_emitted=9, max_tokens=10, request=request)
    life.step(repeat=4)
    life.add_resumed(lane="interactive", max_tokens=2, num_emitted=1, prompt=[3] * 5)
    life.failing_step_that_nobody_computes_again()
    life.teardown()


class TestEvictingMachine(EvictingMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.slow
class TestEvictingMachineAtLength(EvictingMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)
