"""Which matrices of a model an adapter may be beside, and what the adapters that are here add to each.

Blocks know nothing of it: a linear layer gets its table when it is made (`LayerParts.linear`), and adds the products of
the step's rows when it is called. The code that loads adapters assigns the numbers of slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.gpu_config import has_kernels
from kernels.low_rank import AdapterRows, AdapterTable, LowRank, join, make_adapter_table
from kernels.moe import ExpertWeights

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedMatrix:
    """A matrix of the model.

    Attributes:
        modules: Of the checkpoint, by their whole names, whose features stand one after another.
        rows: Output features of each.
        order: `[sum(rows)]` int64, which of the modules' features each feature is; None is in order.
        scales: `[sum(rows)]` float32, what the modules' features are multiplied by; None is by one.
        tables: What multiplies by it in parts: of which features each part is, and its adapters.
        is_gated: The gate and up projections are packed together, their rows interleaved.
        own_rows: `[num_rows]` int64, which features this rank has; None is all, in their order.
        own_columns: `[num_columns]` int64, which inputs this rank has; None is all.
    """

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    order: torch.Tensor | None
    scales: torch.Tensor | None
    tables: tuple[tuple[int, int, AdapterTable], ...]
    is_gated: bool = False
    own_rows: torch.Tensor | None = None
    own_columns: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Output features and input features."""
        return sum(self.rows), self.columns

    def pack(self, low_rank: LowRank) -> list[Any]:
        """Lay out what each table has of an adapter's part."""
        rows = torch.arange(self.shape[0]) if self.own_rows is None else self.own_rows
        is_whole = len(self.tables) == 1 and self.own_rows is None and self.own_columns is None
        parts: list[LowRank | None] = [low_rank]
        if not is_whole:
            parts = [low_rank.of_rows(rows[first:end], self.own_columns) for first, end, _ in self.tables]
        return [
            None if part is None else table.pack(part) for part, (_, _, table) in zip(parts, self.tables, strict=True)
        ]


Packed = Mapping[str, list[Any]]
"""An adapter as the kernels read it: by matrix, a value for each of its tables."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShare:
    """Which of a layer's experts are here, or which features of each.

    Attributes:
        places: The expert in each place of all processes, in the beginning.
        rows: `[num_features]` int64, which features of an expert's first projection are here; None is all.
        columns: Which inputs of the last projection; None is all.
        stored: Both projections of all experts in the checkpoint, where experts move; else None.
    """

    num_experts: int
    places: tuple[int, ...]
    own: range
    rows: torch.Tensor | None = None
    columns: range | None = None
    stored: tuple[ExpertWeights, ExpertWeights] | None = None

    @property
    def experts(self) -> tuple[int, ...]:
        """Those that are here."""
        return self.places[self.own.start : self.own.stop]


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The matrices of a layer's experts as adapters know them, whole.

    Attributes:
        experts: The module of each.
        matrices: Below these, the gate, if there is one, the up and the down projection.
        inner_size: Features between them.
        size: Features of what an expert is given, and gives.
        top_k: Experts of a token.
        layer: The module that they are in.
        is_interleaved: In stacks of experts the features of gate and up projection alternate.
        share: What this rank has of them; None is all.
    """

    experts: tuple[str, ...]
    matrices: tuple[str, ...]
    inner_size: int
    size: int
    top_k: int
    layer: str
    is_interleaved: bool
    share: ExpertShare | None = None


class AdapterTargets:
    """All matrices, and the adapters in their slots. One thread computes steps and places adapters.

    Attributes:
        experts: By their layers; None where no adapter can be beside them.
        can_adapt_experts: Whether adapters can be beside any experts on the device.
    """

    def __init__(self, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.experts_per_token = 1
        self.matrices: dict[str, AdaptedMatrix] = {}
        self.experts: dict[str, ExpertModules | None] = {}
        self._device = device
        self._dtype = dtype
        # The kernels of a GPU have no place for adapters beside experts.
        self.can_adapt_experts = not has_kernels(device)
        # Of the adapter in each slot, the largest.
        self._ranks = np.ones(num_slots, dtype=np.int32)
        # Those of the step before: steps without prompts mostly have the same.
        self._rows: AdapterRows | None = None

    def add(
        self,
        modules: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        *,
        order: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        parts: tuple[int, ...] = (),
        is_gated: bool = False,
        own_rows: torch.Tensor | None = None,
        own_columns: torch.Tensor | None = None,
        is_elsewhere: bool = False,
    ) -> tuple[AdapterTable, ...]:
        """Let adapters be beside a matrix; return a table for each of the parts, `parts` features wide, or for all.

        A matrix that is elsewhere, at other ranks, has none: adapters may have a part beside it.
        """
        num_rows = sum(rows) if own_rows is None else len(own_rows)
        ends = [] if is_elsewhere else np.cumsum(parts or (num_rows,)).tolist()
        tables = tuple(make_adapter_table(self.num_slots, self._device, self._dtype) for _ in ends)
        placed = tuple(zip([0, *ends][: len(ends)], ends, tables, strict=True))
        self.matrices[modules[0]] = AdaptedMatrix(
            modules, rows, columns, order, scales, placed, is_gated, own_rows, own_columns
        )
        return tables

    def add_embedding(self, vocab_size: int, size: int, scale: float, table: AdapterTable | None) -> None:
        """Let adapters change the tokens' embeddings, which are multiplied by `scale`; without a table, elsewhere."""
        scales = None if scale == 1 else torch.full((size,), scale)
        placed = () if table is None else ((0, size, table),)
        self.matrices[EMBEDDING] = AdaptedMatrix((EMBEDDING,), (size,), vocab_size, None, scales, placed)

    def rows(self, slots: npt.NDArray[np.int32]) -> AdapterRows:
        """Return which adapter each row of a step has, by slots; below zero is none. One step at a time uses it."""
        if self._rows is not None and np.array_equal(self._rows.slots, slots):
            self._rows.clear()
        else:
            max_rank = int(np.where(slots >= 0, self._ranks[slots], 1).max(initial=1))
            self._rows = AdapterRows(slots, max_rank, self.experts_per_token)
        return self._rows

    def pack(self, adapter: Mapping[str, LowRank]) -> Packed:
        """Lay an adapter out as the kernels read it; any thread may do so."""
        packed = {name: self.matrices[name].pack(low_rank) for name, low_rank in adapter.items()}
        join(part for parts in packed.values() for part in parts)
        return packed

    def place(self, slot: int, packed: Packed | None, max_rank: int = 1) -> None:
        """Place a packed adapter in a slot below `num_slots` that no step reads; None clears the slot."""
        self._ranks[slot] = max_rank
        self._rows = None
        for name, matrix in self.matrices.items():
            own = None if packed is None else packed.get(name)
            for index, (_, _, table) in enumerate(matrix.tables):
                table.place(slot, None if own is None else own[index])


class EmbeddingAdapters:
    """Changes embeddings: an adapter's first matrix has a column for each token, which is looked up."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._adapters: list[LowRank | None] = [None] * num_slots
        self._device = device

    def pack(self, adapter: LowRank) -> LowRank:
        """Return the adapter on the device that computes."""
        return adapter.to(self._device)

    def place(self, slot: int, packed: Any) -> None:
        """Put an adapter's part into a slot, or clear it."""
        self._adapters[slot] = packed

    def add(self, x: torch.Tensor, result: torch.Tensor, rows: AdapterRows) -> None:
        """Add to `result`, `[num_tokens, size]`, what each token's adapter has for the token ids `x`."""
        for slot in np.unique(rows.slots[rows.slots >= 0]).tolist():
            adapter = self._adapters[slot]
            if adapter is None:
                continue
            own = torch.from_numpy(np.flatnonzero(rows.slots == slot)).to(result.device)
            added = result[own].float()
            for part in adapter.parts:
                added += part.down[:, x[own]].float().T * part.scale @ part.up.float().T
            result[own] = added.to(result.dtype)
