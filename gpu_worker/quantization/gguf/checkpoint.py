"""The tensors of a GGUF file under the names that models ask for, copied out one tensor at a time.

Files of Llama and its kin hold the query and key projections with their rows reordered, for a rotation that pairs
neighbours. Ours pairs the halves of a head, so those rows are put back in order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from gpu_worker.quantization.gguf.blocks import NonFiniteScaleError, unpack
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile, TensorInfo
from gpu_worker.quantization.gguf.tensor_names import CONFIGURATION, tensors_by_name
from gpu_worker.quantization.gguf.tensor_types import BF16, F16, F32, TensorType
from gpu_worker.quantization.quantization_method import KeepsHalf, TensorSource
from kernels.linear.forms import DenseWeight, WeightForm

# Dense tensors are converted in pieces of this many bytes.
_CHUNK_BYTES = 8 << 20
_DTYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
# Handed out as plain numbers even where they are quantized.
_PLAIN = re.compile(
    r"model\.embed_tokens\.weight|model\.layers\.[0-9]+\.self_attn\.(k|v|kv)_b_proj\.weight|(embeddings|encoder)\..*"
)
# Architectures whose converters reorder rows.
_NEIGHBOURS = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "arcee", "mistral3")
_RATE = ".A_log"
# Of a group's scale and its offset, in the engine's form.
_GROUP_BYTES = 8
_REORDERED = re.compile(r"model\.layers\.[0-9]+\.self_attn\.(q|k|qkv)_proj\.(weight|bias)")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Heads:
    turning: int
    still: int = 0


class GGUFCheckpoint:
    """Hands out tensors by name, checked for shape and converted; remembers which were taken. A context manager.

    A tensor that is missing, of another shape, or has a scale that is not finite is a `GGUFError`.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        *,
        keeps_half: KeepsHalf | None = None,
    ) -> None:
        """Open a file; arguments as of `Checkpoint`."""
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._keeps_half = keeps_half
        self._file = GGUFFile(path)
        try:
            self._tensors = tensors_by_name(self._file)
            self._num_heads = self._reordered_heads()
        except BaseException:
            self._file.close()
            raise
        self._taken = set(CONFIGURATION & self._tensors.keys())
        self._num_bytes = sum(info.num_bytes for info in self._tensors.values())
        self._num_bytes_taken = sum(self._tensors[name].num_bytes for name in self._taken)

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def num_bytes_loaded(self, unused: str) -> int:
        """Return the bytes of the loaded tensors, those whose whole name matches `unused` left out."""
        used = [name for name in self._tensors if not re.fullmatch(unused, name)]
        return sum(self._num_bytes_loaded(name) for name in used)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._tensors

    def stored_module(self, name: str) -> str:
        """Return the same name: no configuration of such a file names modules."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, in numbers however they are stored."""
        return self._info(name).shape

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Copy one tensor, which must have exactly this shape; a quantized one is dequantized."""
        return self.take_rows([name], [shape])

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Copy several tensors, concatenated along their first dimension, as one."""
        infos = [self._checked(name, shape) for name, shape in zip(names, shapes, strict=True)]
        num_rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(num_rows), *shapes[0][1:]), dtype=self._dtype_of(infos), device=self._device)
        for name, info, part in zip(names, infos, whole.split_with_sizes(num_rows), strict=True):
            self._fill(part, name, info, range(info.num_bytes // info.row_bytes))
            if (heads := self._heads(name, part.shape[0])) is not None:
                part.copy_(_in_order(part, heads))
            self._mark(name)
        return whole

    def take_raw(self, name: str) -> torch.Tensor:
        """Copy one tensor as it is stored: a quantized one as the bytes of its rows."""
        info = self._info(name)
        raw = torch.from_numpy(self._file.rows(info, 0, info.num_bytes // info.row_bytes)).to(self._device)
        if info.type.bits is None:
            raw = raw.view(_DTYPES[info.type]).view(info.shape)
        heads = self._heads(name, raw.shape[0])
        self._mark(name)
        return raw if heads is None else _in_order(raw, heads)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """Copy one tensor, which must have this shape, as float32."""
        info = self._checked(name, shape)
        tensor = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._fill(tensor, name, info, range(info.num_bytes // info.row_bytes))
        self._mark(name)
        # What files hold is the rate at which a state decays, below zero; checkpoints have its logarithm.
        return (-tensor).log() if name.endswith(_RATE) else tensor

    def ones(self, size: int) -> torch.Tensor:
        """Return as many ones."""
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def take_item(self, name: str, index: int, *shape: int) -> torch.Tensor:
        """Copy item `index` of tensors stacked along the first dimension; the item must have this shape."""
        info = self._checked(name, shape)
        item = torch.empty(shape[1:], dtype=self._dtype_of([info]), device=self._device)
        self._fill(item, name, info, self._item_rows(info, index))
        self._mark_item(name, index)
        return item

    def take_raw_item(self, name: str, index: int) -> torch.Tensor:
        """Copy item `index` of a stack as `take_raw()` does."""
        info = self._info(name)
        rows = self._item_rows(info, index)
        raw = torch.from_numpy(self._file.rows(info, rows.start, len(rows))).to(self._device)
        self._mark_item(name, index)
        return raw if info.type.bits is not None else raw.view(_DTYPES[info.type]).view(info.shape[1:])

    def take_part(self, name: str, item: int | None, box: Sequence[range], *, is_raw: bool) -> torch.Tensor:
        """Copy a box of a matrix, or of one item of a stack, as stored (`is_raw`) or dequantized.

        The box is of rows and columns, in numbers; columns begin and end with blocks.
        """
        info = self._info(name)
        rows = range(info.num_bytes // info.row_bytes) if item is None else self._item_rows(info, item)
        own, columns = box[0], (*box, range(info.shape[-1]))[1]
        heads, order = self._heads(name, len(rows)), None
        if heads is not None:
            order = _in_order(torch.arange(len(rows)), heads)[own.start : own.stop]
            own = range(int(order.min()), int(order.max()) + 1)
        own = range(rows.start + own.start, rows.start + own.stop)
        kind = info.type
        of_a_row = range(
            columns.start // kind.block_size * kind.block_bytes, -(-columns.stop // kind.block_size) * kind.block_bytes
        )
        raw = torch.from_numpy(self._file.part(info, own, of_a_row)).to(self._device)
        if order is not None:
            raw = raw[(order - order.min()).to(raw.device)]
        self._mark(name)
        if is_raw:
            return raw if kind.bits is not None else raw.view(_DTYPES[kind])
        try:
            return _dense(raw, kind).to(self._dtype_of([info]))
        except NonFiniteScaleError:
            raise self.error(name, "has a scale that is not a finite number; copy the file again") from None

    def error(self, name: str, problem: str) -> GGUFError:
        """Make the error that names a tensor and the file that holds it."""
        return GGUFError(self._file.path, f"tensor {self._tensors[name].name!r}", problem)

    def discard(self, pattern: str) -> None:
        """Count tensors whose whole name matches as taken: the model has no use for them."""
        for name in self._tensors:
            if re.fullmatch(pattern, name):
                self._mark(name)

    def check_all_taken(self) -> None:
        """Raise `GGUFError` if a tensor was not used: the weights are of another model than the metadata."""
        unexpected = sorted(self._tensors.keys() - self._taken)
        if unexpected:
            more = f", and neither have {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            raise self.error(unexpected[0], f"has no place in the model that the metadata describe{more}")

    def _reordered_heads(self) -> dict[str, _Heads]:
        metadata = self._file.metadata
        if (architecture := metadata.text("general.architecture")) not in _NEIGHBOURS:
            return {}
        num_heads = metadata.integer(f"{architecture}.attention.head_count")
        field = f"{architecture}.attention.head_count_kv"
        by_layer = metadata.fields.get(field)
        # Of hybrids, layers that do not attend have none.
        if isinstance(by_layer, np.ndarray) and by_layer.dtype.kind in "iu":
            num_kv_heads = int(by_layer.max())
        else:
            num_kv_heads = metadata.integer(field, num_heads)
        return {
            "q": _Heads(num_heads),
            "k": _Heads(num_kv_heads),
            "qkv": _Heads(num_heads + num_kv_heads, num_kv_heads),
        }

    def _heads(self, name: str, num_rows: int) -> _Heads | None:
        match = _REORDERED.fullmatch(name)
        heads = self._num_heads.get(match[1]) if match else None
        if heads is not None and num_rows % (2 * (count := heads.turning + heads.still)):
            raise self.error(name, f"has {num_rows} rows, which {count} heads of an even size cannot share")
        return heads

    def _fill(self, target: torch.Tensor, name: str, info: TensorInfo, rows: range) -> None:
        num_rows, chunk = len(rows), max(1, _CHUNK_BYTES // info.row_bytes)
        target = target.view(num_rows, -1)
        for first in range(0, num_rows, chunk):
            stored = self._file.rows(info, rows.start + first, min(chunk, num_rows - first))
            try:
                target[first : first + chunk] = _dense(torch.from_numpy(stored).to(self._device), info.type)
            except NonFiniteScaleError:
                raise self.error(name, "has a scale that is not a finite number; copy the file again") from None

    def _item_rows(self, info: TensorInfo, index: int) -> range:
        num_rows = info.num_bytes // info.row_bytes // info.shape[0]
        return range(index * num_rows, (index + 1) * num_rows)

    def _mark_item(self, name: str, index: int) -> None:
        # Items are read in order: with the last one the whole has been taken.
        if index == self._tensors[name].shape[0] - 1:
            self._mark(name)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise GGUFError(self._file.path, f"tensor {name!r}", "is missing (by its name in Hugging Face's format)")
        return self._tensors[name]

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._info(name)
        # Converters drop dimensions of one, and give vectors rows.
        is_same = [size for size in info.shape if size != 1] == [size for size in shape if size != 1]
        if not is_same and shape != (math.prod(info.shape),):
            raise self.error(name, f"has shape {list(info.shape)}; the metadata call for {list(shape)}")
        return info

    def _num_bytes_loaded(self, name: str) -> int:
        info = self._tensors[name]
        kind, size = info.type, math.prod(info.shape)
        if kind.bits is None or _PLAIN.fullmatch(name):
            return size * self._dtype_of([info]).itemsize
        return size * kind.bits // 8 + size // kind.group_size * _GROUP_BYTES

    def _dtype_of(self, parts: Sequence[TensorInfo]) -> torch.dtype:
        kind, shape = parts[0].type, parts[0].shape
        if self._keeps_half is None or len(shape) not in (2, 3) or kind not in _DTYPES:
            return self._dtype
        stored = _DTYPES[kind]
        is_kept = all(part.type == kind for part in parts) and self._keeps_half(stored, shape[-1])
        return stored if is_kept else self._dtype

    def _mark(self, name: str) -> None:
        if name in self._taken:
            return
        self._taken.add(name)
        self._num_bytes_taken += self._tensors[name].num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes_taken, self._num_bytes)


def _dense(raw: torch.Tensor, kind: TensorType) -> torch.Tensor:
    if kind.bits is None:
        return raw.view(_DTYPES[kind])
    return unpack(raw, kind).dequantize()


def _in_order(rows: torch.Tensor, heads: _Heads) -> torch.Tensor:
    """Move a head's even rows before its odd ones, which is the order that the rotation of halves needs."""
    turning = rows[: rows.shape[0] // (heads.turning + heads.still) * heads.turning]
    ordered = torch.unflatten(turning, 0, (heads.turning, -1, 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat((ordered, rows[turning.shape[0] :])) if heads.still else ordered


NAME = "gguf"


@dataclass(frozen=True, slots=True)
class GGUFMethod:
    """Linear layers of a GGUF file, whose tensors' `types` are by the names that checkpoints give them."""

    types: Mapping[str, TensorType]
    name: str = NAME

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Take a linear layer's weights: groups of 32 or 16 columns, or dense; raises what `source.error` makes."""
        stored = f"{name}.weight"
        kind = self.types.get(stored)
        if kind is None or kind.bits is None:
            return DenseWeight(source.take(stored, out_features, in_features))
        return self._unpack(source, stored, source.take_raw(stored), kind, (out_features, in_features))

    def has_stack(self, source: TensorSource, name: str) -> bool:
        """Do what `StackMethod` promises."""
        kind = self.types.get(f"{name}.weight")
        return kind is not None and kind.bits is not None

    def take_item(self, source: TensorSource, name: str, index: int, shape: tuple[int, int, int]) -> WeightForm:
        """Do what `StackMethod` promises."""
        stored = f"{name}.weight"
        if source.shape(stored) != shape:
            raise source.error(stored, f"has shape {list(source.shape(stored))}; the metadata call for {list(shape)}")
        return self._unpack(source, stored, source.take_raw_item(stored, index), self.types[stored], shape[1:])

    def _unpack(
        self, source: TensorSource, stored: str, raw: torch.Tensor, kind: TensorType, shape: tuple[int, int]
    ) -> WeightForm:
        columns = raw.shape[1] // kind.block_bytes * kind.block_size
        if (raw.shape[0], columns) != shape:
            problem = f"has shape {[raw.shape[0], columns]}; the metadata call for {list(shape)}"
            raise source.error(stored, problem)
        try:
            return unpack(raw, kind)
        except NonFiniteScaleError:
            raise source.error(stored, "has a scale that is not a finite number; copy the file again") from None


def read_gguf_method(file: GGUFFile) -> GGUFMethod | None:
    """Return how a file's linear layers are quantized; None where all are dense."""
    types = {name: info.type for name, info in tensors_by_name(file).items()}
    return GGUFMethod(types) if any(kind.bits is not None for kind in types.values()) else None
