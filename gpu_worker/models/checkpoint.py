"""The tensors of a model directory: safetensors files, mapped into memory and copied out one tensor at a time.

Nothing but safetensors is ever read: it holds numbers only, whereas pickled formats run code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A name inside the directory: no separator, so that an index cannot point elsewhere.
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")

Progress = Callable[[int, int], None]


class Checkpoint:
    """Hands out tensors by name, checked for shape and converted; remembers which were taken.

    Use as a context manager: leaving it unmaps the files.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        """Open the files of `directory`.

        Args:
            directory: Holds `model.safetensors`, or an index and its shards.
            dtype: What tensors are converted to.
            device: Where they are put.
            progress: Called after each tensor with the numbers taken and in all.

        Raises:
            CheckpointError: A file is missing, damaged, or outside the directory.
        """
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files = ExitStack()
        self._taken: set[str] = set()
        try:
            self._shards = self._open(directory)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Checkpoint:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Unmap the files."""
        self._files.close()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Copy one tensor, which must have exactly this shape.

        Raises:
            CheckpointError: It is missing, has another shape, or is not stored as floating point numbers.
        """
        return self.take_rows([name], [shape])

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Copy several tensors, concatenated along their first dimension, as one.

        Raises:
            CheckpointError: As for `take()`.
        """
        parts = [self._mapped(name, shape) for name, shape in zip(names, shapes, strict=True)]
        num_rows = sum(shape[0] for shape in shapes)
        whole = torch.empty((num_rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for part, rows in zip(parts, whole.split_with_sizes([shape[0] for shape in shapes]), strict=True):
            rows.copy_(part)
        for name in names:
            self._mark(name)
        return whole

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._shards

    def take_raw(self, name: str) -> torch.Tensor:
        """Copy one tensor, of whatever shape and dtype it is stored in.

        Raises:
            CheckpointError: It is missing.
        """
        tensor = self._stored(name).to(self._device, copy=True)
        self._mark(name)
        return tensor

    def error(self, name: str, problem: str) -> CheckpointError:
        """Make the error that names a tensor and the file that holds it."""
        return CheckpointError(self._shards[name][0], f"tensor {name!r} {problem}")

    def discard(self, pattern: str) -> None:
        """Count tensors whose whole name matches as taken: the model has no use for them."""
        for name in self._shards:
            if re.fullmatch(pattern, name):
                self._mark(name)

    def check_all_taken(self) -> None:
        """Check that the model has used every tensor.

        Raises:
            CheckpointError: Some were not, so that the weights are not of the model that `config.json` describes.
        """
        unexpected = sorted(self._shards.keys() - self._taken)
        if unexpected:
            path, _ = self._shards[unexpected[0]]
            more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            raise CheckpointError(path, f"holds tensor {unexpected[0]!r}{more}, which config.json has no place for")

    def _mark(self, name: str) -> None:
        self._taken.add(name)
        if self._progress is not None:
            self._progress(len(self._taken), len(self._shards))

    def _mapped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._stored(name)
        if tuple(tensor.shape) != shape:
            raise self.error(name, f"has shape {list(tensor.shape)}; config.json calls for {list(shape)}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise self.error(name, f"is stored as {tensor.dtype}; supported: float32, float16, bfloat16")
        return tensor

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self._shards:
            path = next(iter(self._shards.values()))[0].parent
            raise CheckpointError(path, f"has no tensor {name!r}, which config.json calls for")
        tensor: torch.Tensor = self._shards[name][1].get_tensor(name)
        return tensor

    def _open(self, directory: Path) -> dict[str, tuple[Path, Any]]:
        """Map tensor names to the open file that holds them."""
        path = directory / SINGLE_FILE
        if path.exists() or not (directory / INDEX_FILE).exists():
            file = self._open_file(path)
            return dict.fromkeys(file.keys(), (path, file))
        index = JsonFile.read(directory / INDEX_FILE)
        weight_map = index.nested("weight_map")
        if weight_map is None or not weight_map.names():
            raise index.error("weight_map", "is missing")
        shard_names = {name: weight_map.text(name) for name in sorted(weight_map.names())}
        opened = {name: self._open_shard(index, name) for name in sorted(set(shard_names.values()))}
        for name, shard in shard_names.items():
            path, _, held = opened[shard]
            if name not in held:
                raise CheckpointError(path, f"does not hold tensor {name!r}, although the index says so")
        return {name: opened[shard][:2] for name, shard in shard_names.items()}

    def _open_shard(self, index: JsonFile, name: str) -> tuple[Path, Any, frozenset[str]]:
        if not _SHARD_NAME.fullmatch(name):
            problem = f"names file {name[:80]!r}; only *.safetensors files in the model's own directory are read"
            raise index.error("weight_map", problem)
        path = index.path.parent / name
        file = self._open_file(path)
        return path, file, frozenset(file.keys())

    def _open_file(self, path: Path) -> Any:
        if not path.is_file():
            raise CheckpointError(path, "is missing; weights are read from safetensors files only")
        try:
            return self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(path, f"is not a whole safetensors file ({error}); copy it again") from None
