from __future__ import annotations

from itertools import pairwise

import pytest

from gpu_worker.execution.warm_up import StepLimits, warm_up_plans

LIMITS = [
    StepLimits(1, 16, 1, 4),
    StepLimits(5, 40, 64, 4),
    StepLimits(64, 2048, 8192, 16),
    StepLimits(300, 50, 100, 1),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_steps_stay_within_their_limits_and_the_first_is_the_largest(limits: StepLimits) -> None:
    plans = list(warm_up_plans(limits))
    for plan in plans:
        assert len(plan.scheduled) <= limits.max_num_seqs
        assert plan.num_tokens == sum(item.num_tokens for item in plan.scheduled) <= limits.max_num_batched_tokens
        for item in plan.scheduled:
            assert 1 <= item.num_tokens == len(item.sequence.token_ids) <= limits.max_model_len
            assert len(item.sequence.block_table) * limits.block_size >= item.num_tokens
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    assert plans[0].num_tokens == min(limits.max_num_batched_tokens, rows * limits.max_model_len)
    assert len(plans[0].scheduled) == rows


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_sequence_departs(limits: StepLimits) -> None:
    plans = list(warm_up_plans(limits))
    for before, after in pairwise(plans):
        assert after.departed == [item.sequence for item in before.scheduled]
    assert plans[-1].scheduled == []


def test_every_power_of_two_of_sequences_and_query_tokens_is_tried() -> None:
    tried = {
        (len(plan.scheduled), max((item.num_tokens for item in plan.scheduled), default=0))
        for plan in warm_up_plans(StepLimits(20, 512, 256, 16))
    }
    for count in (1, 2, 4, 8, 16, 20):
        assert {(count, query_len) for query_len in (1, 2, 4, 8, 16, 32, 64, 128)} <= tried
    assert (1, 256) in tried
