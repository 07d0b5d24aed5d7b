from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch

from gpu_worker.execution.warm_up import StepLimits, warm_up_plans
from kernels.gpu_config import Gpu, GpuGeneration

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


class Launches:
    """In the place of a kernel: keeps what it would have been compiled for."""

    def __init__(self) -> None:
        self.variants: set[frozenset[tuple[str, object]]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **constants: self.variants.add(frozenset(constants.items()))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 1), (8, 8), (40, 8), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_step_needs_an_attention_kernel_that_the_warm_up_does_not_compile(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("kernels.paged_attention.triton_attention")
    limits = StepLimits(70, 600, 700, 16)
    kernels = {name: Launches() for name in vars(module) if name.endswith("_kernel")}
    assert len(kernels) == 3
    for name, kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)

    def variants(shapes: Iterable[tuple[int, int]]) -> dict[str, set[frozenset[tuple[str, object]]]]:
        for kernel in kernels.values():
            kernel.variants = set()
        for num_seqs, max_query_len in shapes:
            cache = torch.empty(9, 16, num_kv_heads, 128, dtype=dtype, device="meta")
            batch = module.PagedAttentionBatch(
                torch.empty(num_seqs + max_query_len - 1, num_heads, 128, dtype=dtype, device="meta"),
                cache,
                cache,
                torch.empty(num_seqs, 38, dtype=torch.int32, device="meta"),
                torch.empty(num_seqs + 1, dtype=torch.int32, device="meta"),
                torch.empty(num_seqs, dtype=torch.int32, device="meta"),
            )
            module.paged_attention_triton(batch, max_query_len, 1.0, None, None, Gpu(GpuGeneration.HOPPER, 132))
        return {name: kernel.variants for name, kernel in kernels.items()}

    plans = [plan.scheduled for plan in warm_up_plans(limits) if plan.scheduled]
    compiled = variants((len(items), max(item.num_tokens for item in items)) for items in plans)
    query_lens = [*range(1, 140), 200, 599, 600]
    needed = variants((count, query_len) for count in range(1, 71) for query_len in query_lens)
    for name in kernels:
        assert needed[name] <= compiled[name]
