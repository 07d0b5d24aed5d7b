"""The reference against mixtures written down token by token in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.activation.experts import GELU_TANH, SILU, clamped_swiglu
from kernels.linear import LinearFactory
from kernels.moe import ExpertWeights, RoutingRule, experts_reference, make_experts, route
from kernels.moe.reference import route_reference
from tests.kernels.moe import plain_mixture
from tests.kernels.moe.mixture_cases import ACTIVATIONS, MIXTURES, RULES, Mixture, random_logits


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


def test_equal_scores_choose_the_lower_expert() -> None:
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


def test_experts_of_other_ranks_contribute_nothing_and_are_not_counted() -> None:
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
