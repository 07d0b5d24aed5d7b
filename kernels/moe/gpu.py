"""Experts by the Triton kernels: sort pairs by expert, multiply twice, add up. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from kernels.activation.experts import ExpertActivation, GatedActivation, kernel_numbers
from kernels.dependent_launch import dependent_launch
from kernels.gpu_config import Gpu, GpuGeneration, Rows
from kernels.linear.forms import SCALE_BLOCK
from kernels.linear.gpu_packed.matrix import TILE_ROWS
from kernels.linear.product_launch import ProductLaunch, launch_for, read_launches
from kernels.linear.rounding import InputRounding
from kernels.linear.rounding.triton_kernel import quantize_tokens_triton
from kernels.low_rank import AdapterRows
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.stacks import DenseStack, ExpertStack, PackedStack, stack_experts
from kernels.moe.triton_products import dense_experts_kernel, packed_experts_kernel, scaled_experts_kernel
from kernels.moe.triton_route import combine
from kernels.moe.triton_sort import SortedPairs, sort_pairs

DENSE_FIELDS = "block_n block_k num_warps num_stages"
DENSE_EXPERTS: dict[str, Rows] = {
    "HOPPER": {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (128, 64, 4, 4), 128: (128, 64, 8, 4)},
    "AMPERE": {16: (64, 64, 4, 5), 32: (64, 64, 4, 4), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3)},
    "ADA": {16: (64, 64, 4, 4), 32: (64, 64, 4, 3), 64: (64, 64, 4, 3), 128: (128, 32, 8, 3)},
}
CODED_FIELDS = "block_n num_warps num_stages"
PACKED_EXPERTS: dict[str, Rows] = {
    "HOPPER": {16: (64, 4, 4), 32: (128, 4, 3), 64: (128, 8, 3)},
    "AMPERE": {16: (64, 4, 4), 32: (64, 4, 3), 64: (64, 8, 3)},
    "ADA": {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 2)},
}
# Of float8 rows too, from more than `SCALED_ROWS` rows an expert on: fewer are bound by reading weights in any form.
SCALED_EXPERTS: dict[str, Rows] = {
    "HOPPER": {64: (128, 4, 4), 128: (128, 8, 4)},
    "BLACKWELL": {64: (64, 4, 4), 128: (64, 8, 4)},
    "ADA": {64: (64, 4, 3), 128: (64, 8, 3)},
}
SCALED_ROWS = 32


_DENSE = read_launches(DENSE_FIELDS, DENSE_EXPERTS)
_PACKED, _SCALED = (read_launches(CODED_FIELDS, table) for table in (PACKED_EXPERTS, SCALED_EXPERTS))
_ROUNDING = InputRounding(torch.float8_e4m3fn, has_blocks=True)


def expert_launch(generation: GpuGeneration, num_rows: int, num_experts: int, *, is_packed: bool) -> ProductLaunch:
    """Return the launch for rows that are shared out among experts; the rows of a program are all of one expert.

    A tile twice the average wastes half at most.
    """
    return launch_for((_PACKED if is_packed else _DENSE)[generation], -(-num_rows // num_experts))


def max_blocks(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return how many blocks of rows there can be, wherever rows go: an expert may have one partly full."""
    return (num_rows + min(num_rows, num_experts) * (block_m - 1)) // block_m


class GpuExperts:
    """Experts on a GPU. One stream at a time calls it."""

    def __init__(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        activation: ExpertActivation,
        first_expert: int,
        gpu: Gpu,
        *,
        has_float8: bool = False,
        num_places: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take experts; pairs are shared out among all `num_places`, or among these alone.

        `dtype` is what the stacks were made with, and those of later experts are.
        """
        self._dtype = dtype
        self._gate_up, self._down = _of_one_type(gate_up, down)
        self._activation = activation
        self._first_expert = first_expert
        self._gpu = gpu
        stacks = (self._gate_up, self._down)
        self._rounds_inputs = has_float8 and all(
            isinstance(each, PackedStack) and each.rounds_inputs for each in stacks
        )
        device = gate_up.words.device if isinstance(gate_up, PackedStack) else gate_up.weight.device
        num_experts = gate_up.shape[0]
        self._num_places = num_places or num_experts
        self._counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64, device=device)

    def prepare(self, gate_up: ExpertWeights, down: ExpertWeights) -> tuple[ExpertStack, ExpertStack]:
        """Do what `kernels.moe.ReplaceableExperts` promises, beside the stream of steps."""
        stream = torch.cuda.Stream(self._counts.device) if self._counts.is_cuda else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            is_gated = isinstance(self._activation, GatedActivation)
            gated, plain = (partial(stack_experts, is_gated=each, dtype=self._dtype) for each in (is_gated, False))
            new = _of_one_type(gated(gate_up), plain(down))
        if stream is not None:
            stream.synchronize()
        for one, other in zip(new, (self._gate_up, self._down), strict=True):
            if _kinds(one) != _kinds(other):
                raise ValueError("an expert is stored in another form than those in whose place it would be")
        return new

    def replace(self, place: int, prepared: tuple[ExpertStack, ExpertStack]) -> None:
        """Do what `kernels.moe.ReplaceableExperts` promises; graphs that were captured read the same memory."""
        for new, stack in zip(prepared, (self._gate_up, self._down), strict=True):
            for one, all_experts in zip(_tensors(new), _tensors(stack), strict=True):
                all_experts[place].copy_(one[0])
                if one.is_cuda:
                    one.record_stream(torch.cuda.current_stream(one.device))

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        adapters: AdapterRows | None = None,
        launch: ProductLaunch | None = None,
    ) -> torch.Tensor:
        """Do what `kernels.moe.Experts` promises; without a launch it takes what the table says.

        No adapter can be beside these experts: `adapters` are those of other matrices.
        """
        dtype = x.dtype
        if len(x) == 0:
            return torch.empty_like(x)
        stacks = (self._gate_up, self._down)
        is_packed = any(isinstance(stack, PackedStack) for stack in stacks)
        plain = next((stack.weight.dtype for stack in stacks if isinstance(stack, DenseStack)), None)
        if plain is not None:
            x = x.to(plain)
        elif dtype is torch.float32:
            x = x.bfloat16()
        ids, weights = ids.contiguous(), weights.contiguous()
        num_experts = len(self._counts)
        num_rows, num_places = ids.numel(), self._num_places
        is_rounded = self._rounds_inputs and dtype is not torch.float32 and num_rows > SCALED_ROWS * num_places
        if is_rounded:
            launch = launch or launch_for(_SCALED[self._gpu.generation], -(-num_rows // num_places))
        launch = launch or expert_launch(self._gpu.generation, num_rows, num_places, is_packed=is_packed)
        if x.dtype is torch.float32:
            # Numbers of twice the size: as many bytes at once.
            launch = replace(launch, block_k=launch.block_k // 2)
        rows = sort_pairs(ids, self._counts, self.tokens_per_expert, self._first_expert, launch.block_m)
        hidden = multiply(x, self._gate_up, rows, launch, self._activation, is_rounded=is_rounded)
        outputs = multiply(hidden, self._down, rows, launch, is_rounded=is_rounded)
        return combine(outputs, ids, weights, self._first_expert, num_experts, dtype)


def _tensors(stack: ExpertStack) -> list[torch.Tensor]:
    """Return what a stack consists of, experts first."""
    if isinstance(stack, DenseStack):
        found = [stack.weight, stack.bias]
    else:
        offsets = None if stack.offsets is None else stack.offsets.words
        found = [stack.words, stack.scales.words, offsets, stack.input_order, stack.bias]
    return [tensor for tensor in found if tensor is not None]


def _kinds(stack: ExpertStack) -> list[object]:
    packed = stack if isinstance(stack, PackedStack) else None
    number = packed and (packed.number, packed.group_size, packed.rounds_inputs, packed.scales.constants)
    return [
        number,
        packed and packed.offsets and packed.offsets.constants,
        *((tensor.dtype, tensor.shape[1:]) for tensor in _tensors(stack)),
    ]


def _of_one_type(gate_up: ExpertStack, down: ExpertStack) -> tuple[ExpertStack, ExpertStack]:
    dtypes = {torch.bfloat16 if isinstance(stack, PackedStack) else stack.weight.dtype for stack in (gate_up, down)}
    is_packed = isinstance(gate_up, PackedStack) or isinstance(down, PackedStack)
    if len(dtypes) == 1 or (is_packed and torch.float32 not in dtypes):
        return gate_up, down
    halves = [
        stack if isinstance(stack, PackedStack) else DenseStack(stack.weight.bfloat16(), stack.bias)
        for stack in (gate_up, down)
    ]
    return halves[0], halves[1]


class _Product(NamedTuple):
    """What the kernels of a product have in common: the grid, and arguments in the kernels' order."""

    grid: tuple[int, int]
    of_rows: tuple[Any, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]


def multiply(
    inputs: torch.Tensor,
    stack: ExpertStack,
    rows: SortedPairs,
    launch: ProductLaunch,
    activation: ExpertActivation | None = None,
    *,
    is_rounded: bool = False,
) -> torch.Tensor:
    """Multiply rows by the matrix of their expert.

    Args:
        inputs: A vector of each token for the first product, of each row for the second.
        stack: Its gates and up projections alternate where the activation has a gate.
        rows: Sorted.
        launch: Of the product.
        activation: Of the first product, whose results are those of rows. None for the second product, whose results
            are those of pairs. Both are in the type of the inputs.
        is_rounded: Round inputs to float8 first; the stack is packed so, too.
    """
    num_experts, out_features, _ = stack.shape
    size = out_features // (1 if activation is None else activation.num_projections)
    outputs = torch.empty((len(rows.pairs), size), dtype=inputs.dtype, device=inputs.device)
    grid = triton.cdiv(out_features, launch.block_n), max_blocks(len(rows.pairs), num_experts, launch.block_m)
    of_rows = (outputs, rows.pairs, rows.row_starts, rows.block_ends, num_experts, out_features)
    constants = {
        "TOP_K": rows.top_k,
        "IS_FIRST": activation is not None,
        "HAS_GATE": isinstance(activation, GatedActivation),
        "EXPERTS": triton.next_power_of_2(num_experts),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "num_stages": launch.num_stages,
        **dependent_launch(inputs.device),
    }
    product = _Product(grid, of_rows, kernel_numbers(activation), constants)
    if isinstance(stack, DenseStack):
        _dense(inputs, stack, launch, product)
    elif is_rounded:
        _scaled(inputs, stack, launch, product)
    else:
        _packed(inputs, stack, launch, product)
    return outputs


def _dense(inputs: torch.Tensor, stack: DenseStack, launch: ProductLaunch, product: _Product) -> None:
    in_features = stack.shape[2]
    launch = replace(launch, block_k=launch.block_k or TILE_ROWS).for_columns(in_features, inputs.element_size())
    dense_experts_kernel[product.grid](
        *(inputs, stack.weight, stack.bias, *product.of_rows, in_features, inputs.stride(0), *product.numbers),
        BLOCK_K=launch.block_k,
        IS_EVEN=in_features % launch.block_k == 0,
        num_warps=launch.num_warps,
        **product.constants,
    )


def _packed(inputs: torch.Tensor, stack: PackedStack, launch: ProductLaunch, product: _Product) -> None:
    in_features, plane, planes = stack.in_features, stack.plane, stack.num_planes
    scales, offsets = stack.scales, stack.offsets
    packed_experts_kernel[product.grid](
        *(inputs, stack.words, scales.words, None if offsets is None else offsets.words, stack.input_order),
        *(stack.bias, *product.of_rows, in_features, inputs.stride(0), stack.words.shape[2]),
        *(scales.words.stride(0), 0 if offsets is None else offsets.words.stride(0), stack.padded_rows),
        *product.numbers,
        KIND=stack.number.name,
        PLANE=plane,
        NUM_PLANES=planes,
        PLANES_PER_PART=stack.groups.planes_per_part,
        SCALES=scales.constants,
        OFFSETS=None if offsets is None else offsets.constants,
        TILE_ROWS=TILE_ROWS,
        IS_EVEN=in_features % (planes * plane) == 0,
        num_warps=launch.warps_for(plane),
        **product.constants,
    )


def _scaled(inputs: torch.Tensor, stack: PackedStack, launch: ProductLaunch, product: _Product) -> None:
    rounded, scales = quantize_tokens_triton(inputs, _ROUNDING, interleaves=True), stack.scales
    numbers = stack.words.view(torch.float8_e4m3fn)
    scaled_experts_kernel[product.grid](
        *(rounded.values, rounded.scales, numbers, scales.words, stack.bias, *product.of_rows),
        *(stack.words.shape[2], rounded.scales.stride(1), scales.words.stride(0), stack.padded_rows),
        *product.numbers,
        BLOCK_K=SCALE_BLOCK,
        SCALES=scales.constants,
        TILE_ROWS=TILE_ROWS,
        num_warps=launch.num_warps,
        **product.constants,
    )
