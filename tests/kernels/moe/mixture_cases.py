"""The rules, activations and mixtures that every implementation is tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.activation.experts import GELU_TANH, RELU_SQUARED, SILU, ExpertActivation, GatedActivation, clamped_swiglu
from kernels.linear.forms import FLOAT4, INT4, DenseWeight, GroupQuantizedWeight, Number, WeightForm
from kernels.moe import ExpertWeights
from tests.kernels.moe import plain_mixture

Plain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

BIAS = torch.linspace(0.4, -0.4, 12)
RULES: list[dict[str, Any]] = [
    {"score": "softmax", "top_k": 2},
    {"score": "softmax", "top_k": 4, "renormalize": True},
    {"score": "softmax", "top_k": 12, "renormalize": True},
    {"score": "softmax_after_topk", "top_k": 4},
    {"score": "sigmoid", "top_k": 1},
    {"score": "softmax", "top_k": 3, "num_groups": 4, "top_k_groups": 2, "scale": 16.0},
    {"score": "softmax", "top_k": 2, "renormalize": True, "bias": BIAS},
    {
        "score": "sigmoid", "top_k": 4, "num_groups": 3, "top_k_groups": 2, "group_score": "top2", "renormalize": True,
        "bias": BIAS, "scale": 2.5,
    },
]  # fmt: skip
ACTIVATIONS: dict[str, tuple[ExpertActivation, Plain]] = {
    "silu": (SILU, plain_mixture.silu),
    "gelu_tanh": (GELU_TANH, plain_mixture.gelu_tanh),
    "gpt_oss": (clamped_swiglu(1.702, 1.5), plain_mixture.gpt_oss),
    "relu_squared": (RELU_SQUARED, plain_mixture.relu_squared),
}


def random_logits(num_tokens: int, num_experts: int) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_experts)) * 2


@dataclass(frozen=True)
class Tensors:
    """A mixture's tensors."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: ExpertWeights
    down: ExpertWeights

    def fit(self, activation: ExpertActivation) -> Tensors:
        """Return the same without gates, where the activation has none; matrices are plain."""
        if isinstance(activation, GatedActivation):
            return self
        inner, bias = self.down.shape[2], self.gate_up.bias
        whole = torch.stack([form.weight for form in self.gate_up.forms if isinstance(form, DenseWeight)])
        up = ExpertWeights.dense(whole[:, inner:].contiguous(), None if bias is None else bias[:, inner:].contiguous())
        return replace(self, gate_up=up)

    def token_by_token(self, plain: Plain) -> torch.Tensor:
        """Return the result in float64."""
        result = torch.zeros(self.x.shape, dtype=torch.float64)
        half = self.down.shape[2]
        for token, row in enumerate(self.x.double()):
            for expert, weight in zip(self.ids[token].tolist(), self.weights[token].double(), strict=True):
                both = self.gate_up.forms[expert].dequantize().double() @ row
                if self.gate_up.bias is not None:
                    both = both + self.gate_up.bias[expert].double()
                out = self.down.forms[expert].dequantize().double() @ plain(both[:half], both[half:])
                if self.down.bias is not None:
                    out = out + self.down.bias[expert].double()
                result[token] += weight * out
        return result


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture."""

    num_tokens: int
    num_experts: int
    top_k: int
    hidden_size: int = 40
    intermediate_size: int = 24
    has_bias: bool = True
    is_to_one: bool = False

    def tensors(self, dtype: torch.dtype) -> Tensors:
        """Return random tensors; weights and inputs have 16 bits of them, so that types differ in arithmetic alone."""
        generator = torch.Generator().manual_seed(self.num_tokens * self.num_experts + self.top_k)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        hidden, inner = self.hidden_size, self.intermediate_size
        gate_up = normal(self.num_experts, 2 * inner, hidden, scale=hidden**-0.5)
        down = normal(self.num_experts, hidden, inner, scale=inner**-0.5)
        biases = [normal(self.num_experts, n) if self.has_bias else None for n in (2 * inner, hidden)]
        order = torch.rand(self.num_tokens, self.num_experts, generator=generator).argsort(dim=1)
        ids = torch.arange(self.num_experts).expand(self.num_tokens, -1) if self.is_to_one else order
        weights = torch.rand(self.num_tokens, self.top_k, generator=generator)
        return Tensors(
            normal(self.num_tokens, hidden),
            ids[:, : self.top_k].int().contiguous(),
            weights,
            ExpertWeights.dense(gate_up, biases[0]),
            ExpertWeights.dense(down, biases[1]),
        )


MIXTURES = [
    Mixture(1, 4, 2),
    Mixture(7, 5, 2, hidden_size=70, intermediate_size=46),
    # Experts that get no token.
    Mixture(3, 16, 1, has_bias=False),
    # All tokens to one expert.
    Mixture(11, 6, 1, is_to_one=True),
    # Every token to all of them.
    Mixture(5, 3, 3, hidden_size=34, intermediate_size=66),
    Mixture(130, 4, 2, has_bias=False),
]


def grouped(number: Number, rows: int, columns: int, seed: int) -> WeightForm:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**number.bits, (rows, columns), generator=generator).to(torch.uint8)
    shape = (rows, columns // 32)
    if number is FLOAT4:
        scales = torch.randint(121, 125, shape, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)
        return GroupQuantizedWeight(number.pack(codes), number, 32, scales)
    scales = torch.rand(shape, generator=generator) * 0.05
    return GroupQuantizedWeight(number.pack(codes), number, 32, scales, -number.centre * scales)


def ordered(rows: int, columns: int, seed: int) -> WeightForm:
    """Codes whose columns are in an order of the expert's own."""
    form = grouped(INT4, rows, columns, seed)
    assert isinstance(form, GroupQuantizedWeight)
    return replace(form, input_order=torch.randperm(columns, generator=torch.Generator().manual_seed(seed)))
