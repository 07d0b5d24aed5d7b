"""The rules that update matrix states, alike: odd sizes of each, inputs for them, and their forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from kernels.gated_delta import DeltaSizes, DeltaWeights, gated_delta
from kernels.gated_delta.dispatch import gated_delta_cpu
from kernels.gated_delta.reference import gated_delta_chunked, gated_delta_reference
from kernels.matrix_state.walk import StateStep
from kernels.ssd import SsdSizes, SsdWeights, ssd
from kernels.ssd.dispatch import ssd_cpu
from kernels.ssd.reference import ssd_chunked, ssd_reference
from kernels.state_rows import StateRows

Sizes = DeltaSizes | SsdSizes
Form = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """What a rule reads of the tokens of a step, and its weights."""

    features: torch.Tensor
    gates: torch.Tensor
    weights: Any
    sizes: Sizes

    def __getitem__(self, tokens: slice) -> Inputs:
        return replace(self, features=self.features[tokens], gates=self.gates[tokens])

    def to(self, device: torch.device) -> Inputs:
        values = {field.name: getattr(self.weights, field.name) for field in fields(self.weights)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        weights = replace(self.weights, **moved)
        return replace(self, features=self.features.to(device), gates=self.gates.to(device), weights=weights)

    def run(self, form: Form, states: torch.Tensor, rows: StateRows, *first: Any, **options: Any) -> torch.Tensor:
        step = StateStep(self.features, self.gates, self.weights, self.sizes, states, rows)
        return form(*first, step, **options)


@dataclass(frozen=True)
class Rule:
    """A rule.

    `small` and `drafted` are sizes of quick tests; `sizes` are those that whole blocks of columns fit, and do not fit.
    """

    op: Form
    compiled: Form
    chunked: Form
    reference: Form
    small: Sizes
    drafted: Sizes
    sizes: tuple[Sizes, ...]

    def __str__(self) -> str:
        return self.op.__name__


DELTA = Rule(
    gated_delta,
    gated_delta_cpu,
    gated_delta_chunked,
    gated_delta_reference,
    DeltaSizes(1, 2, 20, 37),
    DeltaSizes(2, 4, 12, 20),
    (DeltaSizes(1, 1, 1, 1), DeltaSizes(2, 4, 12, 37), DeltaSizes(3, 3, 128, 128), DeltaSizes(1, 2, 130, 119)),
)
SSD = Rule(
    ssd,
    ssd_cpu,
    ssd_chunked,
    ssd_reference,
    SsdSizes(2, 37, 1, 20),
    SsdSizes(2, 33, 2, 16),
    (SsdSizes(1, 1, 1, 1), SsdSizes(4, 37, 2, 12), SsdSizes(3, 90, 1, 128), SsdSizes(2, 200, 2, 130)),
)
RULES = (DELTA, SSD)
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=str)
EACH_SIZE = pytest.mark.parametrize(
    ("rule", "sizes"), [pytest.param(rule, sizes, id=str(sizes)) for rule in RULES for sizes in rule.sizes]
)


def inputs_of(sizes: Sizes, num_tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Make inputs that lie apart in memory, as those of a layer do."""
    heads, key_dim, _ = sizes.state_shape
    generator = torch.Generator().manual_seed(num_tokens + key_dim)
    features = torch.randn(num_tokens, sizes.num_features + 3, generator=generator).to(dtype)
    gates = torch.randn(num_tokens, sizes.num_gates + 1, generator=generator).to(dtype)
    rate = torch.rand(heads, generator=generator) * 4
    step_bias, skip = torch.randn(2, heads, generator=generator)
    weights: DeltaWeights | SsdWeights = DeltaWeights(rate, step_bias)
    if isinstance(sizes, SsdSizes):
        # So that results have the size of values.
        features[:, sizes.inner_size :] *= sizes.state_size**-0.25
        weights = SsdWeights(rate, step_bias, skip, 0.1, 2.0)
    return Inputs(features[:, :-3], gates[:, 1:], weights, sizes)


def pool_of(sizes: Sizes, num_slots: int) -> torch.Tensor:
    return torch.randn(num_slots, *sizes.state_shape, generator=torch.Generator().manual_seed(num_slots))
