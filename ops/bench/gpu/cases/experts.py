"""The experts of a layer: routing, sorting, both products and the weighted sum, beside torch's grouped products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F

from kernels.activation.experts import SILU, GatedActivation, clamped_swiglu
from kernels.linear import LinearFactory
from kernels.linear.forms import FLOAT4, GroupQuantizedWeight, ScaledWeight
from kernels.moe import Experts, ExpertWeights, RoutingRule, experts_reference, make_experts, route
from ops.bench.gpu.case import OURS, Candidate, Case, Op, relative_error
from ops.bench.gpu.cases.quantized_linear import fp8_block_weight, q6_k_weight

_SCALE_GROUP = 32
# Exponents of the scales' powers of two, with the bias of 127.
_LOWEST_SCALE, _HIGHEST_SCALE = 119, 122


class Stored(Enum):
    """What experts are stored in, and its bytes a number."""

    BF16 = 2.0
    MXFP4 = 1 / 2 + 1 / _SCALE_GROUP
    Q6_K = 1 + 4 / 16
    """As kernels pack it: a byte a number, and scales of float32."""
    FP8 = 1.0
    """With a scale a block of 128 rows and columns; inputs are rounded too where rows are many."""


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    """A layer's experts, from the model's published configuration, and their storage format."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    expert_size: int
    activation: GatedActivation
    stored: Stored = Stored.BF16

    @property
    def rule(self) -> RoutingRule:
        """How a token gets its experts."""
        if self.stored is Stored.MXFP4:
            return RoutingRule(self.top_k, "softmax_after_topk")
        return RoutingRule(self.top_k, renormalize=True)

    def weights(self, device: torch.device) -> tuple[ExpertWeights, ExpertWeights]:
        """Make random matrices."""
        gate_up = self._matrices(device, 2 * self.expert_size, self.hidden_size)
        return gate_up, self._matrices(device, self.hidden_size, self.expert_size)

    def _matrices(self, device: torch.device, rows: int, columns: int) -> ExpertWeights:
        shape = (self.num_experts, rows, columns)
        if self.stored is Stored.BF16:
            weight = torch.empty(shape, device=device, dtype=torch.bfloat16)
            return ExpertWeights.dense(weight.normal_(0, columns**-0.5))
        if self.stored is not Stored.MXFP4:
            make = q6_k_weight if self.stored is Stored.Q6_K else fp8_block_weight
            return ExpertWeights(tuple(make(device, rows, columns) for _ in range(self.num_experts)))
        codes = torch.randint(256, (*shape[:2], columns // 2), dtype=torch.uint8, device=device)
        groups = (*shape[:2], columns // _SCALE_GROUP)
        scales = torch.randint(_LOWEST_SCALE, _HIGHEST_SCALE, groups, dtype=torch.uint8, device=device)
        pairs = zip(codes, scales.view(torch.float8_e8m0fnu), strict=True)
        return ExpertWeights(tuple(GroupQuantizedWeight(code, FLOAT4, _SCALE_GROUP, scale) for code, scale in pairs))


QWEN3_30B_A3B = MixtureSizes("Qwen3-30B-A3B", 128, 8, 2048, 768, SILU)
# As in the usual Q4_K_M files, whose down projections have six bits.
QWEN3_30B_A3B_FP8 = replace(QWEN3_30B_A3B, name="Qwen3-30B-A3B fp8", stored=Stored.FP8)
QWEN3_30B_A3B_Q6_K = replace(QWEN3_30B_A3B, name="Qwen3-30B-A3B Q6_K", stored=Stored.Q6_K)
GPT_OSS_20B = MixtureSizes("gpt-oss-20b", 32, 4, 2880, 2880, clamped_swiglu(1.702, 7.0), Stored.MXFP4)


def _make(sizes: MixtureSizes, gate_up: ExpertWeights, down: ExpertWeights) -> Experts:
    return make_experts(LinearFactory(lambda: 0), gate_up, down, sizes.activation)


def experts_error(device: torch.device, sizes: MixtureSizes, num_tokens: int) -> float:
    """Compare with the reference, which multiplies in float32."""
    gate_up, down = sizes.weights(device)
    x = torch.randn(num_tokens, sizes.hidden_size, device=device).bfloat16()
    ids, weights = route(torch.randn(num_tokens, sizes.num_experts, device=device), sizes.rule)
    result = _make(sizes, gate_up, down)(x, ids, weights)
    expected = experts_reference(x, ids, weights, gate_up, down, sizes.activation)
    if sizes.stored is not Stored.FP8:
        return relative_error(result, expected)
    # Inputs may be rounded as the forms say, or not at all.
    first, second = (
        ExpertWeights(tuple(replace(form, activation="none") for form in part.forms if isinstance(form, ScaledWeight)))
        for part in (gate_up, down)
    )
    exact = experts_reference(x, ids, weights, first, second, sizes.activation)
    return min(relative_error(result, expected), relative_error(result, exact))


def experts_case(device: torch.device, sizes: MixtureSizes, num_tokens: int) -> Case:
    """Read the experts that any token has once; all of them together are larger than the cache."""
    gate_up, down = sizes.weights(device)
    x = torch.randn(num_tokens, sizes.hidden_size, device=device).bfloat16()
    logits = torch.randn(num_tokens, sizes.num_experts, device=device)
    experts, rule = _make(sizes, gate_up, down), sizes.rule
    num_read = int(torch.bincount(route(logits, rule)[0].flatten().long()).count_nonzero())
    candidates: dict[str, Candidate] = {OURS: lambda index: experts(x, *route(logits, rule))}
    unavailable = {}
    if sizes.stored is not Stored.BF16:
        unavailable["torch._grouped_mm"] = "it multiplies no codes"
    else:
        candidates["torch._grouped_mm"] = _in_torch(x, logits, rule, gate_up, down)
    # Of an expert its matrices, without biases.
    expert_bytes = int(3 * sizes.hidden_size * sizes.expert_size * sizes.stored.value)
    num_bytes = num_read * expert_bytes + 4 * x.numel()
    num_flops = 6 * num_tokens * sizes.top_k * sizes.hidden_size * sizes.expert_size
    return Case(num_bytes, num_flops, 1, candidates, unavailable)


def _in_torch(
    x: torch.Tensor, logits: torch.Tensor, rule: RoutingRule, gate_up: ExpertWeights, down: ExpertWeights
) -> Callable[[int], torch.Tensor]:
    """Return the same by torch's operators; nothing waits for the device."""
    first, second = (torch.stack([form.dequantize().bfloat16() for form in part.forms]) for part in (gate_up, down))
    num_experts, top_k = len(first), rule.top_k

    def multiply(index: int) -> torch.Tensor:
        weights, ids = logits.softmax(dim=1).topk(top_k, dim=1)
        weights = weights / weights.sum(dim=1, keepdim=True)
        order = ids.flatten().argsort()
        bounds = torch.arange(1, num_experts + 1, device=x.device)
        ends = torch.searchsorted(ids.flatten()[order], bounds).int()
        both = torch._grouped_mm(x[order // top_k], first.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, dim=1)
        outputs = torch._grouped_mm(F.silu(gate) * up, second.transpose(1, 2), offs=ends)
        weighted = outputs * weights.flatten()[order, None].to(outputs.dtype)
        return torch.zeros_like(x).index_add_(0, order // top_k, weighted)

    return multiply


_TINY = MixtureSizes("tiny", 5, 2, 192, 96, SILU)
_CHECKED = (
    _TINY,
    replace(_TINY, name="tiny MXFP4", activation=GPT_OSS_20B.activation, stored=Stored.MXFP4),
    replace(_TINY, name="tiny Q6_K", stored=Stored.Q6_K),
    replace(_TINY, name="tiny fp8", stored=Stored.FP8),
)

EXPERTS = Op(experts_error, experts_case, 1.5e-2).suite(
    "experts",
    {f"{sizes.name} {tokens}": (sizes, tokens) for sizes in _CHECKED for tokens in (1, 7, 300)},
    {
        f"{sizes.name} {tokens} tokens": (sizes, tokens)
        for sizes in (QWEN3_30B_A3B, QWEN3_30B_A3B_FP8, GPT_OSS_20B, QWEN3_30B_A3B_Q6_K)
        for tokens in (1, 16, 64, 256, 4096)
    },
)
