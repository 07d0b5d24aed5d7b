"""The Triton kernels of routing and experts against the reference, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.activation.experts import GatedActivation
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear import LinearFactory
from kernels.linear.forms import FLOAT4, INT4, INT8, DenseWeight, GroupQuantizedWeight, ScaledWeight, SplitWeight
from kernels.linear.product_launch import ProductLaunch
from kernels.moe import RoutingRule, experts_reference, gpu, layers
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.gpu import GpuExperts, expert_launch, max_blocks, multiply
from kernels.moe.layers import ExpertLayers, LinearExperts
from kernels.moe.reference import route_reference
from kernels.moe.stacks import DenseStack, PackedStack, stack_experts
from kernels.moe.triton_route import route_triton
from kernels.moe.triton_sort import sort_pairs
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
from tests.kernels.syncs_forbidden import SyncsForbidden

pytestmark = pytest.mark.usefixtures("assembly_runs")
H200 = Gpu(GpuGeneration.HOPPER, 132)
PACKED = ProductLaunch(block_m=16, block_n=64, num_warps=4, num_stages=2)
DENSE = replace(PACKED, block_k=64)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}


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
    experts = GpuExperts(stacks[0], stacks[1], activation, 0, H200)
    expected = experts_reference(case.x, case.ids, case.weights, case.gate_up, case.down, activation).double()
    launch = launch if device.type == "cpu" else None
    inputs = case.x.to(device), case.ids.to(device), case.weights.to(device)
    with poisoned_memory(), SyncsForbidden():
        result = experts(*inputs, launch=launch)
    assert result.dtype is case.x.dtype
    assert (result.cpu().double() - expected).norm() <= tolerance * expected.norm()
    counts = torch.bincount(case.ids.flatten(), minlength=case.gate_up.num_experts)
    assert torch.equal(experts.tokens_per_expert.cpu(), counts)
    nothing = experts(*(each[:0] for each in inputs), launch=launch)
    assert (nothing.shape, nothing.dtype) == ((0, case.x.shape[1]), case.x.dtype)
    assert torch.equal(experts.tokens_per_expert.cpu(), counts)


def test_results_of_both_products_have_the_type_of_the_inputs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the second one are as many as pairs: in float32 they would be 537 MB of 8,192 tokens and 8 experts."""
    made: list[torch.Tensor] = []

    def kept(*args: Any, **options: Any) -> torch.Tensor:
        made.append(multiply(*args, **options))
        return made[-1]

    monkeypatch.setattr(gpu, "multiply", kept)
    case = Mixture(9, 8, 3).tensors(torch.float16)
    check(case, "silu", DENSE, device, TOLERANCE[torch.float16])
    assert [rows.dtype for rows in made] == [torch.float16] * 2
    assert [len(rows) for rows in made] == [case.ids.numel()] * 2


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


def six_bits(rows: int, columns: int, seed: int) -> GroupQuantizedWeight:
    """Six bits in a byte and groups of 16, as GGUF's Q6_K."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(64, (rows, columns), generator=generator).to(torch.uint8)
    scales = torch.rand(rows, columns // 16, generator=generator) * 0.02
    return GroupQuantizedWeight(codes, INT8, 16, scales, -32 * scales)


FORMS = {
    "six bits": six_bits, "int4": lambda *shape: grouped(INT4, *shape), "fp4": lambda *shape: grouped(FLOAT4, *shape),
    "int4 in an order": ordered, "fp8": fp8,
}  # fmt: skip


def quantized(form: str, num_tokens: int) -> Tensors:
    case = Mixture(num_tokens, 3, 2, hidden_size=160, intermediate_size=96).tensors(torch.float16)
    gate_up = tuple(FORMS[form](192, 160, expert) for expert in range(3))
    down = tuple(FORMS[form](160, 96, 9 + expert) for expert in range(3))
    return replace(case, gate_up=replace(case.gate_up, forms=gate_up), down=replace(case.down, forms=down))


@pytest.mark.parametrize("form", FORMS)
def test_coded_experts_equal_the_reference(form: str, device: torch.device) -> None:
    check(quantized(form, 5), "gpt_oss", PACKED, device, 2e-3)


@pytest.mark.parametrize(("num_tokens", "is_rounded"), [(60, True), (9, False)])
def test_float8_experts_round_the_inputs_of_many_rows(
    num_tokens: int, is_rounded: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales of blocks in both, as the reference does by the forms; of few rows the weights alone are float8."""
    case = Mixture(num_tokens, 3, 2, 160, 200, has_bias=False).tensors(torch.float16)
    gate_up, down = (
        ExpertWeights(tuple(replace(fp8(*shape, expert), activation="dynamic") for expert in range(3)))
        for shape in ((400, 160), (160, 200))
    )
    case = replace(case, gate_up=gate_up, down=down)
    launched: list[int] = []
    kernel = gpu.scaled_experts_kernel

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            launched.append(1)
            return kernel[grid]

    monkeypatch.setattr(gpu, "scaled_experts_kernel", Counted())
    stacks = stack_experts(gate_up.to(device), is_gated=True), stack_experts(down.to(device), is_gated=False)
    activation, plain = ACTIVATIONS["silu"]
    experts = GpuExperts(*stacks, activation, 0, H200, has_float8=True)
    with poisoned_memory(), SyncsForbidden():
        result = experts(case.x.to(device), case.ids.to(device), case.weights.to(device)).cpu().double()
    rounded = experts_reference(case.x, case.ids, case.weights, gate_up, down, activation).double()
    exact = case.token_by_token(plain)
    expected, other = (rounded, exact) if is_rounded else (exact, rounded)
    assert len(launched) == 2 * is_rounded
    assert (result - expected).norm() <= 3e-3 * expected.norm() < (result - other).norm()


def mixed(*forms: str) -> ExpertWeights:
    """Experts of different forms."""
    return ExpertWeights(tuple(FORMS[form](192, 160, expert) for expert, form in enumerate(forms)))


UNEQUAL = {
    "forms": mixed("int4", "fp8", "six bits"),
    "a form that no kernel has": ExpertWeights(
        tuple(
            GroupQuantizedWeight(form.values, INT8, 20, form.scales[:, :8], form.offsets[:, :8])
            for form in (six_bits(192, 160, expert) for expert in range(3))
            if form.offsets is not None
        )
    ),
    "parts": ExpertWeights(
        tuple(SplitWeight((six_bits(96, 160, n), FORMS["int4"](96, 160, n))) for n in range(3))  # type: ignore[arg-type]
    ),
    "types": ExpertWeights((DenseWeight(torch.randn(192, 160)), DenseWeight(torch.randn(192, 160).half()))),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_experts_of_unequal_forms_become_plain_numbers_of_16_bits(name: str) -> None:
    weights = UNEQUAL[name]
    stack = stack_experts(weights, is_gated=False)
    assert isinstance(stack, DenseStack)
    assert torch.equal(stack.weight, torch.stack([form.dequantize().bfloat16() for form in weights.forms]))


@pytest.mark.parametrize("name", ["forms", "a form that no kernel has", "parts"])
def test_experts_of_unequal_forms_equal_the_reference(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Triton's interpreter does not compute in bfloat16.
    monkeypatch.setattr("kernels.moe.stacks.WIDENED", torch.float16)
    case = replace(quantized("int4", 5), gate_up=replace(UNEQUAL[name], bias=quantized("int4", 5).gate_up.bias))
    check(case, "silu", DENSE, device, 2e-3)
    plain = Mixture(5, 3, 2, hidden_size=160, intermediate_size=96).tensors(torch.float16)
    check(replace(case, down=plain.down), "silu", DENSE, device, 2e-3)


def test_no_form_is_multiplied_expert_by_expert_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "cpu_library", lambda: None)
    monkeypatch.setattr(layers, "has_kernels", lambda _: True)
    monkeypatch.setattr(layers, "gpu_of", lambda _: H200)
    monkeypatch.setattr(layers, "has_float8", lambda _: True)
    for weights in [*UNEQUAL.values(), *(mixed(form, form, form) for form in FORMS)]:
        down = ExpertWeights.dense(torch.zeros(weights.num_experts, 160, 96))
        factory = LinearFactory(lambda: 0, torch.bfloat16)
        experts = layers.make_experts(factory, weights, down, ACTIVATIONS["silu"][0])
        assert isinstance(experts, GpuExperts)
        plain = [each for each in (experts._gate_up, experts._down) if isinstance(each, DenseStack)]
        assert all(stack.weight.dtype is torch.bfloat16 for stack in plain)


def test_experts_one_after_another_wait_for_the_device() -> None:
    """Or the check that others do not would find nothing."""
    case, activation = Mixture(5, 3, 2).tensors(torch.float32), ACTIVATIONS["silu"][0]
    layers = [ExpertLayers(*pair) for pair in ((torch.nn.Linear(40, 48), torch.nn.Linear(24, 40)),) * 3]  # type: ignore[arg-type]
    with SyncsForbidden(), pytest.raises(AssertionError, match="waits for the device"):
        LinearExperts(layers, activation, 0, torch.device("cpu"))(case.x, case.ids, case.weights)


def test_wide_matrices_beside_packed_ones_are_narrowed() -> None:
    packed = stack_experts(mixed("int4", "int4"), is_gated=False)
    wide = DenseStack(torch.randn(2, 8, 8), None)
    for pair in ((wide, packed), (packed, wide)):
        experts = GpuExperts(*pair, ACTIVATIONS["silu"][0], 0, H200)
        types = {stack.weight.dtype for stack in (experts._gate_up, experts._down) if isinstance(stack, DenseStack)}
        assert types == {torch.bfloat16}


@pytest.mark.parametrize("has_bias", [False, True])
def test_matrices_of_float32_are_kept_in_the_type_of_the_model(device: torch.device, has_bias: bool) -> None:
    """Scales of blocks that ranks take apart leave float32: twice the memory, and products without tensor cores."""
    case, activation, half = Mixture(9, 4, 2).tensors(torch.float16), ACTIVATIONS["silu"][0], torch.float16
    wide = [_of_float32(weights, has_bias=has_bias) for weights in (case.gate_up, case.down)]
    both = zip(wide, (True, False), strict=True)
    stacks = [stack_experts(weights.to(device), is_gated=is_gated, dtype=half) for weights, is_gated in both]
    experts = GpuExperts(*stacks, activation, 0, H200, dtype=half)
    for stack in stacks:
        assert isinstance(stack, DenseStack)
        assert {stack.weight.dtype, half if stack.bias is None else stack.bias.dtype} == {half}
    given = case.x.to(device), case.ids.to(device), case.weights.to(device)
    for places in ((0, 1, 2, 3), (3, 1, 2, 3), (3, 1, 1, 3)):
        changed = [place for place in (0, 2) if places[place] != place]
        for place in changed:
            experts.replace(place, experts.prepare(*(_chosen(each, places[place]).to(device) for each in wide)))
        result = experts(*given, launch=DENSE if device.type == "cpu" else None).cpu().float()
        placed = [_chosen(weights, *places) for weights in wide]
        expected = experts_reference(case.x, case.ids, case.weights, *placed, activation).float()
        assert (result - expected).norm() <= TOLERANCE[half] * expected.norm()


def _of_float32(weights: ExpertWeights, *, has_bias: bool) -> ExpertWeights:
    bias = torch.randn(weights.shape[:2], generator=torch.Generator().manual_seed(1)) if has_bias else None
    return ExpertWeights(tuple(DenseWeight(form.dequantize()) for form in weights.forms), bias)


def _chosen(weights: ExpertWeights, *experts: int) -> ExpertWeights:
    bias = None if weights.bias is None else weights.bias[list(experts)]
    return ExpertWeights(tuple(weights.forms[expert] for expert in experts), bias)


def test_microscaled_weights_take_their_bits_only() -> None:
    forms = tuple(grouped(FLOAT4, 256, 256, expert) for expert in range(2))
    stack = stack_experts(ExpertWeights(forms), is_gated=True)
    assert isinstance(stack, PackedStack)
    assert stack.words.nbytes + stack.scales.words.nbytes == sum(form.num_bytes for form in forms)


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
        experts = GpuExperts(stacks[0], stacks[1], activation, first, H200)
        with poisoned_memory():
            total += experts(case.x.to(device), case.ids.to(device), case.weights.to(device), DENSE).cpu()
    expected = experts_reference(case.x, case.ids, case.weights, case.gate_up, case.down, activation)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_tiles_follow_the_rows_of_an_expert_among_all_ranks(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with an eighth of the experts gets an eighth of the pairs: its rows an expert are those of one rank."""
    chosen: list[tuple[int, bool]] = []
    sort = gpu.sort_pairs

    def sorted_by(ids: torch.Tensor, *args: Any) -> Any:
        chosen.append((args[-1], False))
        return sort(ids, *args)

    def multiplied(inputs: torch.Tensor, *_: Any, is_rounded: bool) -> torch.Tensor:
        chosen[-1] = (chosen[-1][0], is_rounded)
        return inputs

    monkeypatch.setattr(gpu, "sort_pairs", sorted_by)
    monkeypatch.setattr(gpu, "multiply", multiplied)
    monkeypatch.setattr(gpu, "combine", lambda outputs, *_: outputs)
    num_experts = 64 // num_ranks
    weights = [ExpertWeights((replace(fp8(rows, 256, 0), activation="dynamic"),) * num_experts) for rows in (512, 256)]
    stacks = [stack_experts(each, is_gated=each is weights[0]) for each in weights]
    experts = GpuExperts(stacks[0], stacks[1], ACTIVATIONS["silu"][0], 0, H200, has_float8=True, num_places=64)
    for num_tokens in (8, 512, 1024):
        ids = torch.arange(num_tokens * 4, dtype=torch.int32).view(-1, 4) % 64
        experts(torch.zeros(num_tokens, 256, dtype=torch.bfloat16), ids, torch.zeros(num_tokens, 4))
    # A row, 32 and 64 an expert, the last of which repay that inputs are rounded.
    assert chosen == [(16, False), (32, False), (64, True)]


def test_tiles_follow_the_rows_of_an_expert() -> None:
    for generation in GpuGeneration:
        few, many = (expert_launch(generation, rows, 128, is_packed=False).block_m for rows in (8, 65_536))
        assert (few, many) == (16, 128)
