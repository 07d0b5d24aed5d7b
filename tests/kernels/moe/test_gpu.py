"""The Triton kernels of routing and experts against the reference, in the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.forms import FLOAT4, INT4, ScaledWeight
from kernels.linear.product_launch import ProductLaunch
from kernels.moe import GatedActivation, RoutingRule, experts_reference
from kernels.moe.config import expert_launch, max_blocks
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.gpu import GpuExperts
from kernels.moe.reference import route_reference
from kernels.moe.stacks import PackedStack, stack_experts
from kernels.moe.triton_route import route_triton
from kernels.moe.triton_sort import sort_pairs
from tests.kernels.inline_ptx import interpreted_ptx
from tests.kernels.moe.mixture_cases import (
    ACTIVATIONS,
    MIXTURES,
    RULES,
    Mixture,
    Tensors,
    grouped,
    ordered,
    random_logits,
)
from tests.kernels.poisoned_memory import poisoned_memory

H200 = Gpu(GpuGeneration.HOPPER, 132)
PACKED = ProductLaunch(block_m=16, block_n=64, num_warps=4, num_stages=2)
DENSE = replace(PACKED, block_k=64)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def assembly_runs() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with interpreted_ptx():
        yield


@pytest.mark.parametrize("options", RULES, ids=str)
def test_routing_equals_the_reference(options: dict[str, Any], device: torch.device) -> None:
    logits = random_logits(5, 12)
    rule, bias = RoutingRule(**options), options.get("bias")
    on_device = RoutingRule(**{**options, "bias": None if bias is None else bias.to(device)})
    with poisoned_memory():
        ids, weights = route_triton(logits.to(device), on_device)
    expected_ids, expected = route_reference(logits, rule)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=1e-8)


def test_equal_scores_choose_the_lower_expert(device: torch.device) -> None:
    rule = RoutingRule(3, num_groups=3, top_k_groups=2, group_score="top2")
    assert route_triton(torch.zeros(2, 12, device=device), rule)[0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("options", [RULES[0], RULES[3], RULES[-1]], ids=str)
def test_logits_that_are_not_numbers_choose_experts_that_there_are(
    options: dict[str, Any], device: torch.device
) -> None:
    logits = random_logits(3, 12)
    logits[0] = torch.nan
    logits[1, 5] = torch.nan
    bias = options.get("bias")
    rule = RoutingRule(**{**options, "bias": None if bias is None else bias.to(device)})
    ids, weights = route_triton(logits.to(device), rule)
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert weights[2].isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 37, 700])
def test_pairs_are_sorted_by_expert(num_tokens: int, device: torch.device) -> None:
    """Few pairs by one program, many by three launches; experts below 2 and above 6 are elsewhere."""
    ids = torch.rand(num_tokens, 9, generator=torch.Generator().manual_seed(1)).argsort(dim=1)[:, :3].int()
    counts = torch.zeros(5, dtype=torch.int32, device=device)
    tokens = torch.zeros(5, dtype=torch.int64, device=device)
    expected = torch.bincount(ids.flatten(), minlength=9)[2:7]
    for turn in (1, 2):
        with poisoned_memory():
            rows = sort_pairs(ids.to(device), counts, tokens, 2, 16)
        assert torch.equal(tokens.cpu(), turn * expected)
        assert not counts.any()
        starts = rows.row_starts.tolist()
        assert starts == [0, *expected.cumsum(0).tolist()]
        assert rows.block_ends.tolist() == ((expected + 15) // 16).cumsum(0).tolist()
        assert rows.block_ends[-1] <= max_blocks(ids.numel(), 5, 16)
        for expert, (start, end) in enumerate(pairwise(starts)):
            pairs = rows.pairs[start:end].tolist()
            assert sorted(pairs) == (ids.flatten() == expert + 2).nonzero().flatten().tolist()


def check(case: Tensors, name: str, launch: ProductLaunch | None, device: torch.device, tolerance: float) -> None:
    activation = ACTIVATIONS[name][0]
    case = case.fit(activation)
    stacks = [
        stack_experts(weights.to(device), is_gated=is_gated)
        for weights, is_gated in ((case.gate_up, isinstance(activation, GatedActivation)), (case.down, False))
    ]
    assert stacks[0] is not None
    assert stacks[1] is not None
    experts = GpuExperts(stacks[0], stacks[1], activation, 0, H200)
    expected = experts_reference(case.x, case.ids, case.weights, case.gate_up, case.down, activation).double()
    launch = launch if device.type == "cpu" else None
    with poisoned_memory():
        result = experts(case.x.to(device), case.ids.to(device), case.weights.to(device), launch)
    assert result.dtype is case.x.dtype
    assert (result.cpu().double() - expected).norm() <= tolerance * expected.norm()
    counts = torch.bincount(case.ids.flatten(), minlength=case.gate_up.num_experts)
    assert torch.equal(experts.tokens_per_expert.cpu(), counts)


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_dense_experts_equal_the_reference(mixture: Mixture, device: torch.device) -> None:
    mixture = replace(mixture, num_tokens=min(mixture.num_tokens, 40))
    check(mixture.tensors(torch.float16), "silu", DENSE, device, TOLERANCE[torch.float16])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_the_reference(name: str, device: torch.device) -> None:
    check(Mixture(9, 4, 2).tensors(torch.float32), name, DENSE, device, TOLERANCE[torch.float32])


def fp8(rows: int, columns: int, seed: int) -> ScaledWeight:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 30
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=torch.Generator().manual_seed(seed))
    return ScaledWeight(values.to(torch.float8_e4m3fn), scales * 0.01 + 0.01)


FORMS = {
    "int4": lambda *shape: grouped(INT4, *shape),
    "fp4": lambda *shape: grouped(FLOAT4, *shape),
    "int4 in an order": ordered,
    "fp8": fp8,
}


def quantized(form: str, num_tokens: int) -> Tensors:
    case = Mixture(num_tokens, 3, 2, hidden_size=160, intermediate_size=96).tensors(torch.float16)
    gate_up = tuple(FORMS[form](192, 160, expert) for expert in range(3))
    down = tuple(FORMS[form](160, 96, 9 + expert) for expert in range(3))
    return replace(case, gate_up=replace(case.gate_up, forms=gate_up), down=replace(case.down, forms=down))


@pytest.mark.parametrize("form", FORMS)
def test_coded_experts_equal_the_reference(form: str, device: torch.device) -> None:
    check(quantized(form, 5), "gpt_oss", PACKED, device, 2e-3)


def test_microscaled_weights_take_their_bits_only() -> None:
    forms = tuple(grouped(FLOAT4, 256, 256, expert) for expert in range(2))
    stack = stack_experts(ExpertWeights(forms), is_gated=True)
    assert isinstance(stack, PackedStack)
    assert stack.words.nbytes + stack.scales.nbytes == sum(form.num_bytes for form in forms)


def test_experts_of_other_ranks_contribute_nothing(device: torch.device) -> None:
    case = Mixture(9, 8, 3).tensors(torch.float32)
    activation = ACTIVATIONS["silu"][0]
    total = torch.zeros_like(case.x)
    for first, end in ((0, 3), (3, 8)):
        stacks = []
        for weights, is_gated in ((case.gate_up, True), (case.down, False)):
            assert weights.bias is not None
            part = ExpertWeights(weights.forms[first:end], weights.bias[first:end])
            stacks.append(stack_experts(part.to(device), is_gated=is_gated))
        assert stacks[0] is not None
        assert stacks[1] is not None
        experts = GpuExperts(stacks[0], stacks[1], activation, first, H200)
        with poisoned_memory():
            total += experts(case.x.to(device), case.ids.to(device), case.weights.to(device), DENSE).cpu()
    expected = experts_reference(case.x, case.ids, case.weights, case.gate_up, case.down, activation)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_tiles_follow_the_rows_of_an_expert() -> None:
    for generation in GpuGeneration:
        few, many = (expert_launch(generation, rows, 128, is_packed=False).block_m for rows in (8, 65_536))
        assert (few, many) == (16, 128)
