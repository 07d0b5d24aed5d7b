"""The compiled kernels of routing and experts against the reference.

The reference against mixtures written down token by token in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.activation.experts import GELU_TANH, SILU, clamped_swiglu
from kernels.cpu_library import cpu_library
from kernels.linear import LinearFactory
from kernels.linear.forms import FLOAT4, INT4, INT8, DenseWeight, ScaledWeight, WeightForm
from kernels.low_rank import AdapterRows, AdapterTable, LowRank, LowRankPart, make_adapter_table
from kernels.moe import ExpertWeights, RoutingRule, experts_reference, make_experts, route
from kernels.moe.cpu import CpuExperts
from kernels.moe.layers import LinearExperts
from kernels.moe.reference import route_reference
from tests.kernels.moe import plain_mixture
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

# Of the result's norm. Activations are rounded to the type; with quantized weights, those in bfloat16 to eight bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
ROUNDED = 1.5e-2


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    assert cpu_library() is not None, "the tests need g++"


@pytest.mark.parametrize("options", RULES, ids=str)
def test_routing_equals_the_reference(options: dict[str, Any]) -> None:
    rule = RoutingRule(**options)
    for num_tokens in (1, 900):
        logits = random_logits(num_tokens, 12)
        ids, weights = route(logits, rule)
        expected_ids, expected = route_reference(logits, rule)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-8)


def test_equal_scores_choose_the_lower_expert() -> None:
    rule = RoutingRule(3, num_groups=3, top_k_groups=2, group_score="top2")
    assert route(torch.zeros(2, 12), rule)[0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("options", RULES, ids=str)
def test_logits_that_are_not_numbers_choose_experts_that_there_are(options: dict[str, Any]) -> None:
    logits = random_logits(4, 12)
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    ids, weights = route(logits, RoutingRule(**options))
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert weights[1].isnan().any()
    assert weights[[0, 3]].isfinite().all()


def check(case: Tensors, name: str, tolerance: float, kind: type = CpuExperts) -> None:
    activation = ACTIVATIONS[name][0]
    case = case.fit(activation)
    experts = make_experts(LinearFactory(lambda: 0), case.gate_up, case.down, activation)
    assert type(experts) is kind
    expected = experts_reference(case.x, case.ids, case.weights, case.gate_up, case.down, activation).double()
    for _ in range(2):
        with poisoned_memory():
            result = experts(case.x, case.ids, case.weights)
        assert result.dtype is case.x.dtype
        assert (result.double() - expected).norm() <= tolerance * expected.norm()
    counts = torch.bincount(case.ids.flatten(), minlength=case.gate_up.num_experts)
    assert torch.equal(experts.tokens_per_expert, 2 * counts)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_dense_experts_equal_the_reference(mixture: Mixture, dtype: torch.dtype) -> None:
    check(mixture.tensors(dtype), "silu", TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    check(Mixture(9, 4, 2).tensors(dtype), name, TOLERANCE[dtype])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_16_bits_are_widened_for_float32_inputs(stored: torch.dtype) -> None:
    case = Mixture(9, 4, 2).tensors(stored)
    check(replace(case, x=case.x.float()), "silu", TOLERANCE[torch.float32])


def scaled(dtype: torch.dtype, rows: int, columns: int, seed: int) -> WeightForm:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 30
    scales = torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)) * 0.01
    return ScaledWeight(values.clamp(-127, 127).to(dtype), scales, "dynamic")


FORMS = {
    "int4": lambda *shape: grouped(INT4, *shape),
    "fp4": lambda *shape: grouped(FLOAT4, *shape),
    "int4 in an order": ordered,
    "int8 with rounded inputs": lambda *shape: scaled(torch.int8, *shape),
    "fp8 with rounded inputs": lambda *shape: scaled(torch.float8_e4m3fn, *shape),
}


def quantized(form: str, num_tokens: int, dtype: torch.dtype) -> Tensors:
    case = Mixture(num_tokens, 5, 2, hidden_size=96, intermediate_size=64).tensors(dtype)
    gate_up = tuple(FORMS[form](128, 96, expert) for expert in range(5))
    down = tuple(FORMS[form](96, 64, 9 + expert) for expert in range(5))
    return replace(case, gate_up=replace(case.gate_up, forms=gate_up), down=replace(case.down, forms=down))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 23])
@pytest.mark.parametrize("form", FORMS)
def test_quantized_experts_equal_the_reference(form: str, num_tokens: int, dtype: torch.dtype) -> None:
    tolerance = ROUNDED if dtype is torch.bfloat16 or "rounded" in form else TOLERANCE[dtype]
    check(quantized(form, num_tokens, dtype), "gpt_oss", tolerance)


def test_experts_of_different_forms_are_linear_layers() -> None:
    case = quantized("int4", 6, torch.float32)
    forms = (grouped(INT8, 128, 96, 7), *case.gate_up.forms[1:])
    check(replace(case, gate_up=replace(case.gate_up, forms=forms)), "silu", 1e-5, LinearExperts)


def test_row_does_not_depend_on_batch_or_threads() -> None:
    for case in (Mixture(101, 4, 2, 64, 96).tensors(torch.bfloat16), quantized("int4", 101, torch.bfloat16)):
        experts = make_experts(LinearFactory(lambda: 0), case.gate_up, case.down, SILU)
        together = experts(case.x, case.ids, case.weights)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert torch.equal(experts(case.x, case.ids, case.weights), together)
        finally:
            torch.set_num_threads(num_threads)
        for rows in (slice(0, 1), slice(96, 97), slice(5, 11)):
            assert torch.equal(experts(case.x[rows], case.ids[rows], case.weights[rows]), together[rows])


def test_experts_of_other_ranks_contribute_nothing_and_are_not_counted() -> None:
    case = Mixture(9, 8, 3).tensors(torch.float32)
    whole = make_experts(LinearFactory(lambda: 0), case.gate_up, case.down, SILU)(case.x, case.ids, case.weights)
    parts, counts = [], []
    for first, end in ((0, 3), (3, 8)):
        gate_up, down = (_part(weights, first, end) for weights in (case.gate_up, case.down))
        experts = make_experts(LinearFactory(lambda: 0), gate_up, down, SILU, first)
        assert isinstance(experts, CpuExperts)
        parts.append(experts(case.x, case.ids, case.weights))
        counts += experts.tokens_per_expert.tolist()
        none_here = torch.full_like(case.ids, -1)
        assert not experts(case.x, none_here, case.weights).any()
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-5)
    assert counts == torch.bincount(case.ids.flatten(), minlength=8).tolist()


def _part(weights: ExpertWeights, first: int, end: int) -> ExpertWeights:
    assert weights.bias is not None
    return ExpertWeights(weights.forms[first:end], weights.bias[first:end])


def adapter_of(rows: int, columns: int, rank: int, seed: int, dtype: torch.dtype, *, is_gated: bool) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, columns, generator=generator) * columns**-0.5
    up = torch.randn(rows, rank, generator=generator) * 0.2
    return LowRank((LowRankPart(down.to(dtype), up.to(dtype), 0.7, torch.arange(rows)),), (rows, columns), is_gated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["dense", "int4", "fp4"])
def test_adapters_beside_experts_are_as_merged_and_leave_other_rows(form: str, dtype: torch.dtype) -> None:
    case = Mixture(23, 5, 2, 96, 64).tensors(dtype) if form == "dense" else quantized(form, 23, dtype)
    # Odd ranks, and nothing beside some experts; the adapter of slot 1 is beside the first matrices alone.
    ranks, slots = (3, 17), np.arange(23, dtype=np.int32) % 3 - 1
    tables: tuple[list[AdapterTable], list[AdapterTable]] = ([], [])
    merged: list[tuple[list[WeightForm], list[WeightForm]]] = [([], []), ([], [])]
    for side, weights in enumerate((case.gate_up, case.down)):
        for expert, weight in enumerate(weights.forms):
            table = make_adapter_table(2, case.x.device, dtype)
            for slot, rank in enumerate(ranks):
                dense = weight.dequantize().float()
                if expert != 2 and (slot == 0 or side == 0):
                    adapter = adapter_of(*weight.shape, rank, expert, dtype, is_gated=side == 0)
                    table.place(slot, table.pack(adapter))
                    part = adapter.parts[0]
                    dense = dense + part.scale * part.up.float() @ part.down.float()
                merged[slot][side].append(DenseWeight(dense))
            tables[side].append(table)
    experts = make_experts(LinearFactory(lambda: 0), case.gate_up, case.down, SILU)
    assert isinstance(experts, CpuExperts)
    before = experts(case.x, case.ids, case.weights)
    experts.have_adapters(*tables)
    result = experts(case.x, case.ids, case.weights, AdapterRows(slots, 17, num_products=2))
    assert torch.equal(result[slots < 0], before[slots < 0])
    for slot, (gate_up, down) in enumerate(merged):
        weights = [
            ExpertWeights(tuple(forms), None if of.bias is None else of.bias.float())
            for forms, of in ((gate_up, case.gate_up), (down, case.down))
        ]
        expected = experts_reference(case.x.float(), case.ids, case.weights, *weights, SILU)[slots == slot]
        assert (before[slots == slot] - expected).norm() > 0.1 * expected.norm()
        tolerance = ROUNDED if dtype is torch.bfloat16 else 1e-5
        assert (result[slots == slot] - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("options", RULES, ids=str)
def test_routing_equals_the_formula_token_by_token(options: dict[str, Any]) -> None:
    logits = random_logits(33, 12)
    ids, weights = route_reference(logits, RoutingRule(**options))
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32
    for token, row in enumerate(logits.tolist()):
        expected = plain_mixture.route_token(row, options)
        assert ids[token].tolist() == list(expected)
        assert weights[token].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_reference_equal_scores_choose_the_lower_expert() -> None:
    ids, weights = route_reference(torch.zeros(2, 6), RoutingRule(3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[pytest.approx(1 / 6)] * 3] * 2


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_experts_equal_the_formula_token_by_token(name: str, mixture: Mixture) -> None:
    activation, plain = ACTIVATIONS[name]
    case = mixture.tensors(torch.float32).fit(activation)
    expected = case.token_by_token(plain)
    result = experts_reference(case.x, case.ids, case.weights, case.gate_up, case.down, activation)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_reference_experts_of_other_ranks_contribute_nothing_and_are_not_counted() -> None:
    case = Mixture(num_tokens=9, num_experts=8, top_k=3).tensors(torch.float32)
    whole = experts_reference(case.x, case.ids, case.weights, case.gate_up, case.down, SILU)
    parts, counts = [], []
    for first, end in ((0, 3), (3, 8)):
        gate_up, down = (ExpertWeights(w.forms[first:end], w.bias[first:end]) for w in (case.gate_up, case.down))
        experts = make_experts(LinearFactory(lambda: 0), gate_up, down, SILU, first)
        parts.append(experts(case.x, case.ids, case.weights))
        counts += experts.tokens_per_expert.tolist()
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-5)
    assert counts == torch.bincount(case.ids.flatten(), minlength=8).tolist()


def test_activations_at_their_limits_stay_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 3.0, 3.0, 3.0]])
    for activation, end in ((SILU, 3e4), (GELU_TANH, 3e4), (clamped_swiglu(1.702, 7.0), 4 * 7 / (1 + 6.7e-6))):
        assert activation(gate_up).tolist()[0] == pytest.approx([0, end, 0], rel=1e-4)


@pytest.mark.parametrize("jitter", [0.01, 0.4])
def test_choice_and_weights_equal_transformers(jitter: float) -> None:
    modeling = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(1))
    logits[0] = 0
    ids, weights = route(logits, RoutingRule(2, score="sparse_mixer", jitter=jitter, scale=2.0))
    expected_weights, expected_ids = modeling.sparsemixer(logits, jitter, training=False)
    assert ids.dtype is torch.int32
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, 2 * expected_weights)
    assert (weights < 2).any()
