"""The matrices of all experts of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.forms import DenseWeight, SplitWeight, WeightForm


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One projection of all experts: a matrix each, of equal shapes, in the forms of `kernels.linear.forms`.

    Attributes:
        forms: Of each expert, `[out_features, in_features]`. Those of a tensor that holds all experts may be views.
        bias: `[num_experts, out_features]`, or None.
    """

    forms: tuple[WeightForm, ...]
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert len({form.shape for form in self.forms}) == 1
        assert self.bias is None or self.bias.shape == (self.num_experts, self.forms[0].shape[0])

    @staticmethod
    def dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> ExpertWeights:
        """Return plain numbers, `[num_experts, out_features, in_features]`, which are not copied."""
        return ExpertWeights(tuple(DenseWeight(matrix) for matrix in weight), bias)

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return len(self.forms)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(num_experts, out_features, in_features)`."""
        return (self.num_experts, *self.forms[0].shape)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(form.num_bytes for form in self.forms) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        form = self.forms[0]
        part = form.parts[0] if isinstance(form, SplitWeight) else form
        return (part.weight if isinstance(part, DenseWeight) else part.values).device

    def bias_of(self, expert: int) -> torch.Tensor | None:
        """Return the bias of an expert."""
        return None if self.bias is None else self.bias[expert]

    def to(self, device: torch.device) -> ExpertWeights:
        """Return the same weights on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return ExpertWeights(tuple(form.to(device) for form in self.forms), bias)
