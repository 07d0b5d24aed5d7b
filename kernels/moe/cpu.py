"""Routing and experts by the compiled CPU kernels (`cpu.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.activation.experts import ExpertActivation, GatedActivation, kernel_numbers
from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import MatrixStructure, MixtureStructure, RoutingStructure, address_of, addresses_of
from kernels.linear.cpu.cpu import QuantizedPanels, input_layout
from kernels.linear.dense.cpu import can_pack
from kernels.linear.forms import DenseWeight, SplitWeight, WeightForm
from kernels.linear.panels import PanelMatrix, matrix_structure, pack_panels
from kernels.low_rank import AdapterRows, AdapterTable
from kernels.low_rank.cpu import CpuAdapterTable
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.reference import RoutingRule

MAX_EXPERTS = 1024
_SCORES = {"softmax": 0, "sigmoid": 1, "softmax_after_topk": 2}
_NUM_BEST = {"max": 1, "top2": 2}


def can_route(logits: torch.Tensor) -> bool:
    """Return True where the kernel supports the logits."""
    return logits.is_cpu and logits.dtype is torch.float32 and logits.shape[1] <= MAX_EXPERTS


def can_route_by(rule: RoutingRule) -> bool:
    """Return True where the kernel knows the rule."""
    return rule.score in _SCORES and rule.group_score in _NUM_BEST


def route_cpu(library: CpuLibrary, logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `kernels.moe.route` promises."""
    logits = logits.contiguous()
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, rule.top_k, dtype=torch.int32)
    weights = torch.empty(num_tokens, rule.top_k)
    structure = ctypes.byref(routing_structure(rule, num_experts))
    library.route(structure, *addresses_of(logits, ids, weights), num_tokens, torch.get_num_threads())
    return ids, weights


def routing_structure(rule: RoutingRule, num_experts: int) -> RoutingStructure:
    """Describe a rule to the kernel; the structure holds the address of its bias."""
    groups = rule.num_groups, rule.top_k_groups, _NUM_BEST[rule.group_score]
    choice = num_experts, rule.top_k, _SCORES[rule.score], rule.renormalize
    return RoutingStructure(address_of(rule.bias), *choice, *groups, rule.scale)


def layout_of(weights: ExpertWeights) -> tuple[object, ...] | None:
    """Return what the kernel's matrices have in common; None where they differ, or the kernel does not support them."""
    layouts = {_layout(form) for form in weights.forms}
    return layouts.pop() if len(layouts) == 1 else None


def _layout(form: WeightForm) -> tuple[object, ...] | None:
    if isinstance(form, DenseWeight):
        return (form.weight.dtype,) if can_pack(form.weight) else None
    return None if isinstance(form, SplitWeight) else input_layout(form)


class CpuExperts:
    """Experts on packed weights. Owns the memory between operations: one thread calls it at a time."""

    def __init__(
        self,
        library: CpuLibrary,
        gate_up: tuple[PanelMatrix, ...],
        down: tuple[PanelMatrix, ...],
        activation: ExpertActivation,
        first_expert: int,
        layouts: tuple[object, object] = (None, None),
    ) -> None:
        """Take packed matrices; `layouts` are those that experts have which may take the place of others."""
        self._library = library
        self._packed = (list(gate_up), list(down))
        self._layouts = layouts
        self.packs_gates = isinstance(activation, GatedActivation)
        num_experts = len(gate_up)
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64)
        matrices = [(MatrixStructure * num_experts)(*map(matrix_structure, parts)) for parts in (gate_up, down)]
        self._matrices = matrices
        self.structure = MixtureStructure(
            *(*map(ctypes.addressof, matrices), self.tokens_per_expert.data_ptr()),
            *(num_experts, first_expert, down[0].num_outputs, down[0].num_inputs),
            *(*kernel_numbers(activation), self.packs_gates),
        )
        self._takes_bfloat16 = all(
            isinstance(parts[0], QuantizedPanels) or parts[0].weight.dtype is torch.bfloat16
            for parts in (gate_up, down)
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._tables: tuple[ctypes.Array[ctypes.c_void_p], ...] = ()

    def have_adapters(self, gate_up: Sequence[AdapterTable], down: Sequence[AdapterTable]) -> None:
        """Do what `kernels.moe.AdaptableExperts` promises."""
        self._tables = tuple(
            (ctypes.c_void_p * len(tables))(*(table.address for table in tables if isinstance(table, CpuAdapterTable)))
            for tables in (gate_up, down)
        )
        self.structure.gate_up_adapters, self.structure.down_adapters = map(ctypes.addressof, self._tables)

    def prepare(self, gate_up: ExpertWeights, down: ExpertWeights) -> tuple[PanelMatrix, PanelMatrix]:
        """Do what `kernels.moe.ReplaceableExperts` promises."""
        if (layout_of(gate_up), layout_of(down)) != self._layouts:
            raise ValueError("an expert is stored in another form than those in whose place it would be")
        (first,) = pack_experts(self._library, gate_up, is_gated=self.packs_gates)
        (last,) = pack_experts(self._library, down, is_gated=False)
        return first, last

    def replace(self, place: int, prepared: tuple[PanelMatrix, PanelMatrix]) -> None:
        """Do what `kernels.moe.ReplaceableExperts` promises."""
        for packed, matrices, new in zip(self._packed, self._matrices, prepared, strict=True):
            matrices[place], packed[place] = matrix_structure(new), new

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapters: AdapterRows | None = None
    ) -> torch.Tensor:
        """Do what `kernels.moe.Experts` promises."""
        dtype = x.dtype
        if dtype is not torch.float32 and not (dtype is torch.bfloat16 and self._takes_bfloat16):
            x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        num_tokens, top_k = ids.shape
        ids, weights = ids.contiguous(), weights.contiguous()
        number = DTYPE_NUMBERS[x.dtype]
        structure = ctypes.byref(self.structure)
        scratch = self._memory(self._library.experts_scratch(structure, number, num_tokens, top_k))
        result = torch.empty(x.shape, dtype=x.dtype)
        rows = adapters.cpu.address if adapters is not None and self._tables else None
        self._library.experts(
            *(structure, *addresses_of(x, ids, weights, result), x.stride(0), number, num_tokens, top_k),
            *(scratch, rows, torch.get_num_threads()),
        )
        return result.to(dtype)

    def _memory(self, num_bytes: int) -> int:
        if len(self._scratch) < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()


def pack_experts(
    library: CpuLibrary, weights: ExpertWeights, dtype: torch.dtype | None = None, *, is_gated: bool
) -> tuple[PanelMatrix, ...]:
    """Pack the matrices of all experts; the plain ones can be freed afterwards.

    Args:
        library: Knows the width of a panel on this machine.
        weights: On a CPU.
        dtype: Of the inputs, and of what becomes dense: experts of different forms, or of those that no kernel knows.
            None keeps matrices that have a layout in common as they are.
        is_gated: As for `kernels.linear.dense.cpu.pack`.
    """
    forms = weights.forms
    if dtype is not None and layout_of(weights) is None:
        forms = tuple(DenseWeight(form.dequantize().to(dtype)) for form in forms)

    def dtype_of(form: WeightForm) -> torch.dtype:
        """Return the type that a dense matrix keeps."""
        return form.weight.dtype if isinstance(form, DenseWeight) else torch.float32

    return tuple(
        pack_panels(library, form, dtype or dtype_of(form), weights.bias_of(expert), is_gated=is_gated)
        for expert, form in enumerate(forms)
    )


@dataclass(frozen=True, slots=True, eq=False)
class CpuMixture:
    """Router, rule and experts as the decoder stack takes them."""

    router: PanelMatrix
    routing: RoutingStructure
    rule: RoutingRule
    experts: CpuExperts


def make_cpu_mixture(
    library: CpuLibrary,
    router: PanelMatrix,
    rule: RoutingRule,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: GatedActivation,
    dtype: torch.dtype,
) -> CpuMixture:
    """Pack a mixture for a decoder stack that computes in `dtype`."""
    experts = CpuExperts(
        library,
        pack_experts(library, gate_up, dtype, is_gated=True),
        pack_experts(library, down, dtype, is_gated=False),
        activation,
        0,
    )
    return CpuMixture(router, routing_structure(rule, gate_up.num_experts), rule, experts)
