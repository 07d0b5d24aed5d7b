from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.execution.drafts.proposer import DraftRequest
from gpu_worker.execution.warm_up import StepLimits, WarmUpProposer, warm_up_plans, warm_up_proposer
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.layer_cache import LayerCache
from kernels.paged_attention import AttentionOptions
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import TOKEN_BUDGET, load, make_device_runner
from tests.gpu_worker.execution.engine_run import make_sequence, run
from tests.gpu_worker.plans import shares_of

LIMITS = [
    StepLimits(1, 16, 1, 4),
    StepLimits(5, 40, 64, 4),
    StepLimits(64, 2048, 8192, 16),
    StepLimits(300, 50, 100, 1),
    StepLimits(1, 16, 1, 4, 5),
    StepLimits(1, 40, 64, 4, 5),
    StepLimits(64, 2048, 8192, 16, 63),
    StepLimits(300, 50, 100, 1, 7),
    StepLimits(4, 3, 100, 2, 7),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_steps_stay_within_their_limits_and_the_first_is_the_largest(limits: StepLimits) -> None:
    plans = list(warm_up_plans(limits))
    for plan, items in zip(plans, shares_of(plans), strict=True):
        assert len(items) <= limits.max_num_seqs
        assert plan.num_tokens == sum(item.num_tokens for item in items) <= limits.max_num_batched_tokens
        for item in items:
            assert 1 <= item.num_tokens == len(item.sequence.token_ids) <= limits.max_model_len
            assert item.num_draft_tokens <= limits.max_draft_tokens
            num_tokens = item.num_tokens + item.num_draft_tokens
            assert num_tokens <= limits.max_model_len
            assert len(item.sequence.block_table) * limits.block_size >= num_tokens
        num_drafts = sum(item.num_draft_tokens for item in items)
        assert plan.num_tokens + num_drafts <= limits.max_num_batched_tokens
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    assert plans[0].num_tokens == min(limits.max_num_batched_tokens, rows * limits.max_model_len)
    assert len(plans[0].rows) == rows


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_sequence_departs_with_the_next_plan(limits: StepLimits) -> None:
    plans = list(warm_up_plans(limits))
    for before, after in pairwise(plans):
        assert after.departed == before.rows
        assert len(after.new) == len(after.rows)


def test_every_power_of_two_of_sequences_and_query_tokens_is_tried() -> None:
    tried = {
        (len(items), max(item.num_tokens for item in items))
        for items in shares_of(warm_up_plans(StepLimits(20, 512, 256, 16)))
    }
    for count in (1, 2, 4, 8, 16, 20):
        assert {(count, query_len) for query_len in (1, 2, 4, 8, 16, 32, 64, 128)} <= tried
    assert (1, 256) in tried


def test_as_many_rows_are_verified_as_a_step_may_have_and_each_number_that_kernels_tell_apart() -> None:
    plans = shares_of(warm_up_plans(StepLimits(20, 512, 256, 16, 5)))
    rows = {sum(1 + item.num_draft_tokens for item in items) for items in plans if items[0].num_draft_tokens}
    assert max(rows) == 20 * 6
    assert set(range(2, 65)) <= rows
    everything = [items for items in plans if len(items) == 20 and all(item.num_draft_tokens == 5 for item in items)]
    samplings = [items[0].sequence.sampling for items in everything]
    assert any(sampling.logprobs and sampling.repetition_penalty != 1 and sampling.top_p < 1 for sampling in samplings)


class Launches:
    """In the place of a kernel: keeps what it would have been compiled for."""

    def __init__(self) -> None:
        self.variants: set[frozenset[tuple[str, object]]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **constants: self.variants.add(frozenset(constants.items()))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dtype"),
    [
        pytest.param(4, 1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(8, 8, torch.float32, marks=pytest.mark.slow),
        (40, 8, torch.bfloat16),
        pytest.param(6, 2, torch.float32, marks=pytest.mark.slow),
        pytest.param(4, 1, torch.float32, marks=pytest.mark.slow),
        pytest.param(8, 8, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(40, 8, torch.float32, marks=pytest.mark.slow),
        pytest.param(6, 2, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_no_step_needs_an_attention_kernel_that_the_warm_up_does_not_compile(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("kernels.paged_attention.triton_attention")
    limits = StepLimits(70, 600, 700, 16, 5)
    kernels = {name: Launches() for name in vars(module) if name.endswith("_kernel")}
    assert len(kernels) == 4
    for name, kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)

    def variants(shapes: Iterable[tuple[int, int]]) -> dict[str, set[frozenset[tuple[str, object]]]]:
        for kernel in kernels.values():
            kernel.variants = set()
        for num_seqs, max_query_len in shapes:
            num_tokens = num_seqs + max_query_len - 1
            cache = torch.empty(9, 16, num_kv_heads, 128, dtype=dtype, device="meta")
            batch = module.PagedAttentionBatch(
                torch.empty(num_tokens, num_heads, 128, dtype=dtype, device="meta"),
                LayerCache(cache, cache),
                torch.empty(num_seqs, 38, dtype=torch.int32, device="meta"),
                torch.empty(num_seqs + 1, dtype=torch.int32, device="meta"),
                torch.empty(num_seqs, dtype=torch.int32, device="meta"),
                AttentionOptions(1.0),
            )
            module.paged_attention_triton(batch, max_query_len, Gpu(GpuGeneration.HOPPER, 132))
        return {name: kernel.variants for name, kernel in kernels.items()}

    plans = shares_of(warm_up_plans(limits))
    compiled = variants((len(items), max(item.num_tokens + item.num_draft_tokens for item in items)) for items in plans)
    query_lens = [*range(1, 140), 200, 599, 600]
    needed = variants((count, query_len) for count in range(1, 71) for query_len in query_lens)
    for name in kernels:
        assert needed[name] <= compiled[name]


class CountingProposer(WarmUpProposer):
    """Notes for how many sequences it is asked at once, and how long they are."""

    def __init__(self) -> None:
        self.batches: set[int] = set()
        self.lengths: set[int] = set()
        self.running: set[BatchSequence] = set()

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        self.batches.add(len(requests))
        self.lengths |= {len(request.sequence.token_ids) for request in requests}
        self.running |= {request.sequence for request in requests}
        return super().propose(requests)

    def forget(self, sequence: BatchSequence) -> None:
        self.running.discard(sequence)


@pytest.mark.parametrize(("num_drafts", "most"), [(3, 16), (1, 32), (63, 1)])
def test_proposer_is_asked_for_every_size_of_batch_and_left_with_nothing(
    num_drafts: int, most: int, directory: Path
) -> None:
    runner = make_device_runner(load(directory, "cpu"), is_graphed=False, max_draft_tokens=num_drafts)
    proposer = CountingProposer()
    runner.verify_drafts_of(proposer)

    warm_up_proposer(runner)

    assert proposer.batches == set(range(1, most + 1))
    assert {2, 3, 5, 9, 17, 33, TOKEN_BUDGET + 1} <= proposer.lengths
    assert not proposer.running
    sequences = [make_sequence("a", [1, 2, 3], Sampling(temperature=0.0, max_tokens=3))]
    assert len(run(runner, sequences).tokens["a"]) == 3
