"""Matrices that are still in the checkpoint, of which a rank reads its rows or columns alone.

The shapes of a quantized layer's tensors tell how many features, along the output or the input, an entry covers. A
method gets the part of each tensor as if that were all. Where an entry's features would be split, or inputs are not in
order, the whole is read, and cut by `kernels.linear.forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch

from gpu_worker.quantization.quantization_method import TensorSource
from kernels.linear import forms
from kernels.linear.forms import WeightForm

# Rows and columns are read in stretches that begin and end at multiples of these: no form takes them apart.
_UNITS = (128, 256)
_MAX_STRETCHES = 64
# Tensors of quantized layers that have the input first; all others have the output first.
_INPUT_FIRST = (".qweight", ".qzeros", ".scales")


class MatrixSource(TensorSource, Protocol):
    """A checkpoint, or a part of each of its tensors."""

    def take_item(self, name: str, index: int, *shape: int) -> torch.Tensor:
        """Return one of the tensors that are stacked along the first dimension of one, which has this shape.

        Items are taken in order.
        """


@runtime_checkable
class PartSource(MatrixSource, Protocol):
    """A checkpoint that hands out parts of tensors."""

    def take_part(self, name: str, item: int | None, box: Sequence[range], *, is_raw: bool) -> torch.Tensor:
        """Return a part of a tensor, or of one of those that are stacked along its first dimension.

        Args:
            name: Of the tensor.
            item: Number of the one in the stack; None where there is none.
            box: Which entries, of the first dimensions; of others all.
            is_raw: As it is stored, as `take_raw` does, quantized blocks as bytes; else as `take` does.
        """


class _WholeNeededError(Exception):
    """A part cannot be told from the tensors' shapes."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A matrix of a checkpoint: a module, or one of a stack.

    Attributes:
        shape: `(out_features, in_features)`.
        read: Takes the matrix from a source that shows it, of a shape.
        is_transposed: A plain matrix, stored `[in_features, out_features]`.
        is_quantized: It may be.
    """

    source: PartSource
    name: str
    shape: tuple[int, int]
    read: Callable[[MatrixSource, tuple[int, int]], WeightForm]
    item: int | None = None
    is_transposed: bool = False
    is_quantized: bool = True

    def stretch(self, features: range, axis: int) -> range:
        """Return a stretch of the rows or columns that holds these, and takes apart nothing that shares scales."""
        unit = _UNITS[axis] if self.is_quantized else 1
        return range(features.start // unit * unit, min(self.shape[axis], -(-features.stop // unit) * unit))

    def part(self, rows: range, columns: range) -> WeightForm:
        """Read some rows and columns."""
        if len(rows) == self.shape[0] and len(columns) == self.shape[1]:
            return self.read(self.source, self.shape)
        shown = _ShownPart(self, rows, columns)
        try:
            form = self.read(shown, (len(rows), len(columns)))
            shown.check(form)
        except _WholeNeededError:
            form = self.read(self.source, self.shape)
            if len(rows) < self.shape[0]:
                form = forms.select_rows(form, torch.arange(rows.start, rows.stop))
            if len(columns) < self.shape[1]:
                form, inputs = forms.select_columns(form, columns)
                assert inputs is None, "such columns are not asked for"
        return form


class _ShownPart:
    """Shows a method the tensors of a part of a matrix as if they were all. Does what `TensorSource` promises."""

    def __init__(self, piece: StoredPiece, rows: range, columns: range) -> None:
        self._piece = piece
        self._source = piece.source
        self._features = (rows, columns)
        self._num_columns_of_a_scale: set[int] = set()
        self._is_turned = piece.is_transposed
        if piece.item is not None and self._source.has(piece.name):
            # A stack without a name of its own for the matrix; a square one counts as not turned.
            matrix = self._source.shape(piece.name)[1:]
            self._is_turned |= matrix != piece.shape and matrix == piece.shape[::-1]

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def stored_module(self, name: str) -> str:
        return self._source.stored_module(name)

    def error(self, name: str, problem: str) -> Exception:
        return self._source.error(name, problem)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._source.shape(name)
        first = 0 if self._piece.item is None else 1
        box = self._box(name, stored[first:])
        return (*stored[:first], *map(len, box), *stored[first + len(box) :])

    def take(self, name: str, *shape: int) -> torch.Tensor:
        whole = self._piece.shape[::-1] if self._piece.is_transposed else self._piece.shape
        if self._source.shape(name) != whole:
            # Reading the whole raises its error.
            raise _WholeNeededError
        return self._source.take_part(name, None, self._box(name, whole), is_raw=False)

    def take_raw(self, name: str) -> torch.Tensor:
        stored = self._source.shape(name)
        if name.endswith(".weight_shape"):
            if self._source.take_raw(name).tolist() != list(self._piece.shape):
                raise _WholeNeededError
            return torch.tensor([len(features) for features in self._features])
        part = self._source.take_part(name, None, self._box(name, stored), is_raw=True)
        # The groups of some columns are numbered from their own first one.
        is_cut = name.endswith("g_idx") and len(self._features[1]) < self._piece.shape[1]
        return part - part[0] if is_cut else part

    def take_item(self, name: str, index: int, *shape: int) -> torch.Tensor:
        """Take a plain matrix of a stack."""
        stored = self._source.shape(name)[1:]
        if stored != (self._piece.shape[::-1] if self._is_turned else self._piece.shape):
            raise _WholeNeededError
        return self._source.take_part(name, index, self._box(name, stored), is_raw=False)

    def take_raw_item(self, name: str, index: int) -> torch.Tensor:
        return self._source.take_part(name, index, self._box(name, self._source.shape(name)[1:]), is_raw=True)

    def check(self, form: WeightForm) -> None:
        """Raise `_WholeNeededError` unless groups are as wide as scales seemed to be for."""
        if isinstance(form, forms.GroupQuantizedWeight) and len(self._features[1]) < self._piece.shape[1]:
            for width in self._num_columns_of_a_scale:
                if width != form.group_size or width >= form.shape[1]:
                    raise _WholeNeededError

    def _box(self, name: str, stored: tuple[int, ...]) -> list[range]:
        end = name[len(self._piece.name) :]
        if end.endswith(("input_scale", "activation_scale", "weight_shape")):
            return []
        axes = [0, 1]
        if end in _INPUT_FIRST or self._is_turned:
            axes = [1, 0]
        if end.endswith("g_idx"):
            axes = [1]
        is_scale = "scale" in end or "zero" in end
        return [self._entries(axis, count, is_scale) for axis, count in zip(axes, stored, strict=False)]

    def _entries(self, axis: int, count: int, is_scale: bool) -> range:
        features, num_features = self._features[axis], self._piece.shape[axis]
        if count == 1 or len(features) == num_features:
            return range(count)
        width = _features_of_an_entry(count, num_features)
        if features.start % width or (features.stop % width and features.stop != num_features):
            raise _WholeNeededError
        if axis == 1 and is_scale:
            self._num_columns_of_a_scale.add(width)
        return range(features.start // width, -(-features.stop // width))


def _features_of_an_entry(count: int, num_features: int) -> int:
    width, rest = divmod(num_features, count)
    if width and not rest and width & (width - 1) == 0:
        return width
    if -(-num_features // forms.SCALE_BLOCK) == count:
        return forms.SCALE_BLOCK
    raise _WholeNeededError


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """Matrices of the same input, one above the other, in the checkpoint.

    Attributes:
        order: `[out_features]` int64, which of their rows each row is; None is in order.
        factors: `[out_features]` float32, what their rows are multiplied by, in the checkpoint's order; None is by one.
    """

    pieces: tuple[StoredPiece, ...]
    order: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    _starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        starts = [0]
        for piece in self.pieces:
            starts.append(starts[-1] + piece.shape[0])
        object.__setattr__(self, "_starts", tuple(starts))

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return self._starts[-1], self.pieces[0].shape[1]

    def whole(self) -> WeightForm:
        """Read all."""
        form = forms.concatenate([piece.part(*map(range, piece.shape)) for piece in self.pieces])
        if self.factors is not None:
            form = forms.scale_rows(form, self.factors)
        return form if self.order is None else forms.reorder_rows(form, self.order)

    def dequantize(self) -> torch.Tensor:
        """Read all, as plain numbers."""
        return self.whole().dequantize()

    def rows(self, rows: torch.Tensor) -> WeightForm:
        """Read rows; see `select_rows`."""
        rows = rows if self.order is None else self.order[rows]
        found, places, first = [], torch.empty(self.shape[0], dtype=torch.int64), 0
        for number, stretch in self._stretches(rows):
            start = self._starts[number]
            found.append(self.pieces[number].part(stretch, range(self.shape[1])))
            places[start + stretch.start : start + stretch.stop] = torch.arange(first, first + len(stretch))
            first += len(stretch)
        form = forms.concatenate(found)
        chosen = places[rows]
        if len(chosen) != first or not torch.equal(chosen, torch.arange(first)):
            form = forms.select_rows(form, chosen)
        return form if self.factors is None else forms.scale_rows(form, self.factors[rows])

    def columns(self, columns: range) -> tuple[WeightForm, torch.Tensor | None]:
        """Read columns; see `select_columns`."""
        if any(has_input_order(piece.source, piece.name) for piece in self.pieces):
            return forms.select_columns(self.whole(), columns)
        stretch = self.pieces[0].stretch(columns, 1)
        form = forms.concatenate([piece.part(range(piece.shape[0]), stretch) for piece in self.pieces])
        if len(stretch) != len(columns):
            form, _ = forms.select_columns(form, range(columns.start - stretch.start, columns.stop - stretch.start))
        if self.factors is not None:
            form = forms.scale_rows(form, self.factors)
        return form if self.order is None else forms.reorder_rows(form, self.order), None

    def _stretches(self, rows: torch.Tensor) -> Iterator[tuple[int, range]]:
        wanted = torch.unique(rows)
        for number, (start, stop) in enumerate(pairwise(self._starts)):
            own = wanted[(wanted >= start) & (wanted < stop)] - start
            if not len(own):
                continue
            gaps = (own.diff() > 1).nonzero()[:, 0].tolist()
            firsts, lasts = [0, *(gap + 1 for gap in gaps)], [*gaps, len(own) - 1]
            stretches: list[range] = []
            for first, last in zip(own[firsts].tolist(), own[lasts].tolist(), strict=True):
                stretch = self.pieces[number].stretch(range(first, last + 1), 0)
                if stretches and stretch.start <= stretches[-1].stop:
                    stretch = range(stretches.pop().start, stretch.stop)
                stretches.append(stretch)
            if len(stretches) > _MAX_STRETCHES:
                stretches = [range(stretches[0].start, stretches[-1].stop)]
            yield from ((number, stretch) for stretch in stretches)


def has_input_order(source: TensorSource, name: str) -> bool:
    """Whether the columns of a module's matrix are in another order than the inputs."""
    groups = (f"{name}.g_idx", f"{name}.weight_g_idx")
    return any(source.has(group) and bool((source.take_raw(group).diff() < 0).any()) for group in groups)


def whole(form: WeightForm | StoredMatrix) -> WeightForm:
    """Return a matrix, read if it is still stored."""
    return form.whole() if isinstance(form, StoredMatrix) else form


def rows_of(form: WeightForm | StoredMatrix, rows: torch.Tensor) -> WeightForm:
    """Do what `select_rows` does, of a stored matrix by reading no others."""
    return form.rows(rows) if isinstance(form, StoredMatrix) else forms.select_rows(form, rows)


def columns_of(form: WeightForm | StoredMatrix, columns: range) -> tuple[WeightForm, torch.Tensor | None]:
    """Do what `select_columns` does, of a stored matrix by reading no others."""
    return form.columns(columns) if isinstance(form, StoredMatrix) else forms.select_columns(form, columns)
