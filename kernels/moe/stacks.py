"""The matrices of all experts of a layer as a GPU's kernels read them: one tensor for each part of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.linear.forms import FLOAT8, SCALE_BLOCK, CodedMatrix, DenseWeight, SplitWeight
from kernels.linear.gpu_packed import PackedMatrix, can_pack, pack_matrices
from kernels.linear.gpu_packed.group_numbers import GroupNumbers
from kernels.moe.expert_weights import ExpertWeights

WIDENED = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class DenseStack:
    """Plain matrices `[num_experts, out_features, in_features]`, contiguous; biases `[num_experts, out_features]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(num_experts, out_features, in_features)`."""
        num_experts, out_features, in_features = self.weight.shape
        return num_experts, out_features, in_features


@dataclass(frozen=True, slots=True, eq=False)
class PackedStack(PackedMatrix):
    """Packed matrices of all experts: the parts of a `PackedMatrix`, each with a dimension of experts in front.

    Attributes:
        bias: `[num_experts, out_features]`, or None.
        rounds_inputs: Whether all are float8 with a scale a block, whose inputs may be rounded alike.
    """

    bias: torch.Tensor | None = None
    rounds_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(num_experts, out_features, in_features)`."""
        return self.words.shape[0], self.out_features, self.in_features


ExpertStack = DenseStack | PackedStack


def stack_experts(weights: ExpertWeights, *, is_gated: bool, dtype: torch.dtype = torch.float32) -> ExpertStack:
    """Put all experts into one stack: packed if all have one form that kernels know, else as plain numbers.

    With `is_gated`, the rows of each matrix are all gates and then all up projections; in the stack they alternate.
    Plain ones keep their type, but float32 and its biases become `dtype`: quantized matrices that were cut apart are
    float32, whatever the model computes in. Matrices of different or unknown forms are dequantized to `WIDENED`:
    experts one after another would have to ask the device which of them have tokens, which no captured step can.
    """
    rows = torch.arange(weights.shape[1], device=weights.device)
    order = rows.view(2, -1).t().flatten() if is_gated else None
    bias = weights.bias if weights.bias is None or order is None else weights.bias[:, order]
    coded = [form.coded() for form in weights.forms if not isinstance(form, DenseWeight | SplitWeight)]
    kinds = {(matrix.number, matrix.group_size) for matrix in coded}
    if len(coded) == weights.num_experts and len(kinds) == 1 and can_pack(coded[0]):
        return _stack(coded, order, bias)
    stored = {form.weight.dtype if isinstance(form, DenseWeight) else WIDENED for form in weights.forms}
    kept = stored.pop() if len(stored) == 1 else WIDENED
    if kept is torch.float32:
        kept, bias = dtype, None if bias is None else bias.to(dtype)
    stack = torch.empty(weights.shape, dtype=kept, device=weights.device)
    for matrix, form in zip(stack, weights.forms, strict=True):
        plain = form.weight if isinstance(form, DenseWeight) else form.dequantize()
        matrix.copy_(plain if order is None else plain[order])
    return DenseStack(stack, bias)


def _stack(coded: Sequence[CodedMatrix], order: torch.Tensor | None, bias: torch.Tensor | None) -> PackedStack:
    packed = pack_matrices([matrix if order is None else _in_order(matrix, order) for matrix in coded])
    first = packed[0]
    return PackedStack(
        first.number,
        torch.stack([matrix.words for matrix in packed]),
        _stack_numbers([matrix.scales for matrix in packed]),
        None if first.offsets is None else _stack_numbers([matrix.offsets for matrix in packed if matrix.offsets]),
        first.group_size,
        first.out_features,
        first.in_features,
        _stack_orders(packed),
        None,
        None if bias is None else bias.contiguous(),
        first.number is FLOAT8
        and first.group_size == SCALE_BLOCK
        and first.offsets is None
        and all(matrix.activation == "dynamic" for matrix in coded),
    )


def _in_order(matrix: CodedMatrix, order: torch.Tensor) -> CodedMatrix:
    offsets = None if matrix.offsets is None else matrix.offsets[order]
    return CodedMatrix(
        matrix.number, matrix.codes[order], matrix.scales[order], offsets, matrix.group_size, matrix.input_order
    )


def _stack_numbers(numbers: Sequence[GroupNumbers]) -> GroupNumbers:
    return replace(numbers[0], words=torch.stack([of_matrix.words for of_matrix in numbers]))


def _stack_orders(packed: Sequence[PackedMatrix]) -> torch.Tensor | None:
    if all(matrix.input_order is None for matrix in packed):
        return None
    plain = torch.arange(packed[0].in_features, device=packed[0].words.device)
    return torch.stack([plain if matrix.input_order is None else matrix.input_order for matrix in packed]).int()
