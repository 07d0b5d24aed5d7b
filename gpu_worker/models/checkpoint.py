"""The tensors of a model directory: safetensors files, read to the device one tensor at a time.

Nothing but safetensors is ever read: it holds numbers only, whereas pickled formats run code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.tensor_file import (
    Renaming,
    StoredTensor,
    TensorFile,
    check_distinct,
    open_shards,
    own_names,
    stored_modules,
    with_names,
)
from gpu_worker.models.tensor_reader import TensorReader
from gpu_worker.quantization.quantization_method import KeepsHalf

# Bytes of two tensors that are compared at a time.
_COMPARED = 4 << 20
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Progress = Callable[[int, int], None]


class Checkpoint:
    """Hands out tensors by name, checked for shape and converted; remembers which were taken.

    A context manager that closes the files. A tensor or an item that is missing, or of another shape or
    type, is a `CheckpointError`.

    Attributes:
        num_unused: Tensors that were left out.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        *,
        keeps_half: KeepsHalf | None = None,
        adds_root: bool = False,
        renamed: Renaming = (),
        unused: Sequence[str] = (),
    ) -> None:
        """Open the single file, or the index and shards, of `directory`.

        Args:
            directory: Of the files.
            dtype: What tensors are converted to.
            device: Where they are put.
            progress: Called after each tensor with the bytes taken and all bytes, in the files.
            keeps_half: Tells which matrices are not converted; None converts all.
            renamed: Patterns in names, and what they are replaced by, before anything else.
            unused: Patterns of whole names, after renaming: such tensors are left out.
            adds_root: Give tensors of a checkpoint of layers alone the names they have in a whole model.
        """
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._keeps_half = keeps_half
        self._files = ExitStack()
        self._taken: set[str] = set()
        self._num_bytes_taken = 0
        try:
            shards = open_shards(directory, self._files)
            self._name_tensors(shards, own_names(shards, renamed, adds_root=adds_root), unused)
        except BaseException:
            self._files.close()
            raise
        self._num_bytes = sum(file.tensors[name].num_bytes for name, file in self._shards.items())
        self._reader = TensorReader(device)
        self._files.callback(self._reader.close)

    def _name_tensors(self, shards: dict[str, TensorFile], names: Mapping[str, str], unused: Sequence[str]) -> None:
        used = {name: own for name, own in names.items() if not any(re.fullmatch(each, own) for each in unused)}
        check_distinct(self._directory, used)
        found = with_names(shards, names)
        self._shards = {own: found[own] for own in used.values()}
        self.num_unused = len(names) - len(used)
        self._stored_names = {own: stored for stored, own in names.items()}
        self._stored_modules = stored_modules(names)

    def num_bytes_loaded(self, unused: str) -> int:
        """Return the bytes of the loaded tensors, those whose whole name matches `unused` left out."""
        used = [name for name in self._shards if not re.fullmatch(unused, name)]
        return sum(self._num_bytes_loaded(self._shards[name].tensors[name]) for name in used)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Copy one tensor, which must have exactly this shape."""
        return self.take_rows([name], [shape])

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Copy several tensors, concatenated along their first dimension, as one."""
        for name, shape in zip(names, shapes, strict=True):
            self._check(name, shape)
        num_rows = sum(shape[0] for shape in shapes)
        dtype = self._dtype_of([self._stored(name) for name in names])
        whole = torch.empty((num_rows, *shapes[0][1:]), dtype=dtype, device=self._device)
        for name, rows in zip(names, whole.split_with_sizes([shape[0] for shape in shapes]), strict=True):
            self._read(name, rows)
        return whole

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """Copy one tensor, which must have this shape, as float32."""
        self._check(name, shape)
        tensor = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._read(name, tensor)
        return tensor

    def ones(self, size: int) -> torch.Tensor:
        """Return as many ones."""
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def take_item(self, name: str, index: int, *shape: int) -> torch.Tensor:
        """Copy item `index` of tensors stacked along the first dimension; the item must have this shape."""
        self._check(name, shape)
        stored = self._item(name, index)
        item = torch.empty(stored.shape, dtype=self._dtype_of([stored]), device=self._device)
        self._read_item(name, index, item)
        return item

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._shards

    def stored_module(self, name: str) -> str:
        """Return the checkpoint's name of a module, which configurations mean; the same where it has none of it."""
        return self._stored_modules.get(name, name)

    def are_same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers, of the same type and shape; False if one is missing."""
        if not (self.has(name) and self.has(other)):
            return False
        files, tensors = (self._shards[name], self._shards[other]), (self._stored(name), self._stored(other))
        if (tensors[0].dtype, tensors[0].shape) != (tensors[1].dtype, tensors[1].shape):
            return False
        num_bytes = tensors[0].num_bytes

        def part(which: int, start: int) -> bytes:
            return os.pread(files[which].fd, min(_COMPARED, num_bytes - start), tensors[which].offset + start)

        return all(part(0, start) == part(1, start) for start in range(0, num_bytes, _COMPARED))

    def is_plain(self) -> bool:
        """Whether all matrices are stored as floating point numbers of 16 or 32 bits."""
        stored = (file.tensors[name] for name, file in self._shards.items())
        return all(each.dtype in _FLOATS for each in stored if len(each.shape) > 1)

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors that are not left out."""
        return tuple(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape as stored."""
        return self._stored(name).shape

    def take_raw(self, name: str) -> torch.Tensor:
        """Copy one tensor in its stored shape and dtype."""
        tensor = torch.empty(self._stored(name).shape, dtype=self._raw_dtype(name), device=self._device)
        self._read(name, tensor)
        return tensor

    def take_raw_item(self, name: str, index: int) -> torch.Tensor:
        """Copy item `index` of tensors stacked along the first dimension, as it is stored."""
        item = torch.empty(self._item(name, index).shape, dtype=self._raw_dtype(name), device=self._device)
        self._read_item(name, index, item)
        return item

    def take_part(self, name: str, item: int | None, box: Sequence[range], *, is_raw: bool) -> torch.Tensor:
        """Copy a box of one tensor, or of one item of a stack.

        Args:
            name: Of the tensor.
            item: Index in the stack; None if it is none.
            box: Which entries of the first dimensions; all of the others.
            is_raw: Keep the stored dtype; else convert, as `take()` does.
        """
        stored = self._stored(name) if item is None else self._item(name, item)
        dtype = self._raw_dtype(name) if is_raw else self._dtype_of([stored])
        if not is_raw and stored.dtype not in _FLOATS:
            raise self.error(name, f"is stored as {stored.dtype}; supported: float32, float16, bfloat16")
        shape = (*map(len, box), *stored.shape[len(box) :])
        part = torch.empty(shape, dtype=dtype, device=self._device)
        self._reader.read_box(self._shards[name], stored, box, part)
        self._mark(name)
        return part

    def error(self, name: str, problem: str) -> CheckpointError:
        """Make the error that names a tensor as it is stored, and the file that holds it, or else the directory."""
        path = self._shards[name].path if name in self._shards else self._directory
        return CheckpointError(path, f"tensor {self._stored_names.get(name, name)!r} {problem}")

    def discard(self, pattern: str) -> None:
        """Count tensors whose whole name matches as taken: the model has no use for them."""
        for name in self._shards:
            if re.fullmatch(pattern, name):
                self._mark(name)

    def check_all_taken(self) -> None:
        """Raise `CheckpointError` if a tensor was not used: the weights are then not of the model in `config.json`."""
        unexpected = sorted(self._shards.keys() - self._taken)
        if unexpected:
            path, name = self._shards[unexpected[0]].path, self._stored_names[unexpected[0]]
            more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            problem = f"holds tensor {name!r}{more}, which config.json has no place for"
            raise CheckpointError(path, f"{problem}; config.json is another model's, or says less than the model has")

    def _read(self, name: str, out: torch.Tensor) -> None:
        file = self._shards[name]
        self._reader.read(file, file.tensors[name], out)
        self._mark(name)

    def _read_item(self, name: str, index: int, out: torch.Tensor) -> None:
        self._reader.read(self._shards[name], self._item(name, index), out)
        # Items are read in order: with the last one the whole has been taken.
        if index == self._stored(name).shape[0] - 1:
            self._mark(name)

    def _mark(self, name: str) -> None:
        if name in self._taken:
            return
        self._taken.add(name)
        self._num_bytes_taken += self._stored(name).num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes_taken, self._num_bytes)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._stored(name)
        if stored.shape != shape:
            raise self.error(name, f"has shape {list(stored.shape)}; config.json calls for {list(shape)}")
        if stored.dtype not in _FLOATS:
            raise self.error(name, f"is stored as {stored.dtype}; supported: float32, float16, bfloat16")

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._shards:
            problem = f"has no tensor {name!r}, which config.json calls for"
            raise CheckpointError(
                self._directory, f"{problem}; copy the files again: some are missing or another model's"
            )
        return self._shards[name].tensors[name]

    def _item(self, name: str, index: int) -> StoredTensor:
        stored = self._stored(name)
        if not stored.shape or not 0 <= index < stored.shape[0]:
            raise self.error(name, f"has shape {list(stored.shape)}, and no item {index}")
        size = stored.num_bytes // stored.shape[0]
        return StoredTensor(stored.dtype, stored.shape[1:], stored.offset + index * size, size)

    def _raw_dtype(self, name: str) -> torch.dtype:
        dtype = self._stored(name).dtype
        if not isinstance(dtype, torch.dtype):
            raise self.error(name, f"is stored as {dtype}, which PyTorch does not have")
        return dtype

    def _num_bytes_loaded(self, stored: StoredTensor) -> int:
        if stored.dtype not in _FLOATS:
            return stored.num_bytes
        return stored.num_elements * self._dtype_of([stored]).itemsize

    def _dtype_of(self, parts: Sequence[StoredTensor]) -> torch.dtype:
        stored, shape = parts[0].dtype, parts[0].shape
        is_matrix = len(shape) == 2 or (len(shape) == 3 and shape[1] > 1)
        if self._keeps_half is None or not is_matrix or not isinstance(stored, torch.dtype):
            return self._dtype
        is_kept = all(part.dtype == stored for part in parts) and self._keeps_half(stored, shape[-1])
        return stored if is_kept else self._dtype
