"""From the files of an adapter to what it adds to each matrix of the model that is loaded.

The model's own matrices say what fits: a module that they do not have, or have in other sizes, is of another model, and
refused. Files are those of strangers: nothing is read that is larger than its bound, and every number is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.adapters.config import MAX_RANK, AdapterConfig, AdapterError, read_config
from gpu_worker.layers.adapters import EMBEDDING, HEAD, AdaptedMatrix, AdapterTargets, Packed
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.tensor_file import StoredTensor, TensorFile
from gpu_worker.models.tensor_reader import TensorReader
from kernels.low_rank import LowRank, LowRankPart
from shared.adapter_store import WEIGHTS_NAME

_ROOT = "base_model.model."
_TENSOR = re.compile(r"(.+?)\.lora_(embedding_)?([AB])(\.default)?(\.weight)?")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MAX_TENSORS = 200_000
# What stands before the layers in models that wrap a decoder of text.
_WRAPPERS = re.compile(r"^(?:.*\.)?(layers\.\d+\.|embed_tokens$)")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in memory; `low_ranks` are by the matrix of `AdapterTargets` that each is beside."""

    low_ranks: Mapping[str, LowRank]

    @property
    def max_rank(self) -> int:
        """Return the largest rank."""
        return max(low_rank.rank for low_rank in self.low_ranks.values())

    @property
    def num_bytes(self) -> int:
        """Return the memory that it takes."""
        return sum(low_rank.num_bytes for low_rank in self.low_ranks.values())


@dataclass(frozen=True, slots=True)
class _Module:
    name: str
    down: str
    up: str
    is_embedding: bool


def read_adapter(directory: Path, targets: AdapterTargets, renamed: tuple[tuple[str, str], ...] = ()) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors` for the model of `targets`; `renamed` is the family's.

    Raises:
        AdapterError: It is of a kind that is not served, broken, or of another model.
        CheckpointError: A file is missing or damaged.
    """
    config = read_config(directory)
    file = TensorFile(directory / WEIGHTS_NAME)
    with closing(file), closing(TensorReader(torch.device("cpu"))) as reader:
        modules = _modules(file, renamed)
        places: dict[str, list[tuple[str, int]]] = {}
        for key, item in targets.matrices.items():
            for index, name in enumerate(item.modules):
                places.setdefault(name, []).append((key, index))
        parts: dict[str, list[LowRankPart]] = {}
        for name, module in modules.items():
            if name not in places:
                problem = (
                    "but the model has no such linear layer that an adapter can be beside; was it made for another?"
                )
                raise AdapterError(f"{WEIGHTS_NAME} has {module.down[:120]!r}, {problem}")
            for key, index in places[name]:
                matrix = targets.matrices[key]
                pair = _read_pair(file, reader, module, config, (matrix.rows[index], matrix.columns))
                parts.setdefault(key, []).append(_part(matrix, index, *pair, config.scale_of(module.name)))
    found = {
        key: LowRank(tuple(own), targets.matrices[key].shape, targets.matrices[key].is_gated)
        for key, own in parts.items()
    }
    if not found:
        raise AdapterError(f"{WEIGHTS_NAME} has no matrices")
    return Adapter(found)


def _modules(file: TensorFile, renamed: tuple[tuple[str, str], ...]) -> dict[str, _Module]:
    if len(file.tensors) > _MAX_TENSORS:
        raise AdapterError(f"{WEIGHTS_NAME} has {len(file.tensors)} tensors; at most {_MAX_TENSORS} are read")
    found: dict[str, dict[str, str]] = {}
    embeddings = set()
    for tensor in file.tensors:
        if "magnitude" in tensor:
            raise AdapterError(f"{WEIGHTS_NAME} has {tensor[:120]!r}: DoRA is not served")
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            raise AdapterError(f"{WEIGHTS_NAME} has {tensor[:120]!r}, which is neither lora_A nor lora_B of a module")
        module, is_embedding, side = match[1], match[2], match[3]
        if is_embedding:
            embeddings.add(module)
        if found.setdefault(module, {}).setdefault(side, tensor) != tensor:
            raise AdapterError(f"{WEIGHTS_NAME} has lora_{side} of {module[:120]!r} twice")
    modules: dict[str, _Module] = {}
    for module, sides in found.items():
        if len(sides) < 2:
            missing = "B" if "A" in sides else "A"
            raise AdapterError(f"{WEIGHTS_NAME} has no lora_{missing} of {module[:120]!r}")
        name = _own_name(module.removeprefix(_ROOT), renamed)
        if name in modules:
            raise AdapterError(f"{WEIGHTS_NAME} has two modules that are both the model's {name[:120]!r}")
        modules[name] = _Module(module.removeprefix(_ROOT), sides["A"], sides["B"], module in embeddings)
    return modules


def _own_name(module: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """Return what the model calls a module: as its own checkpoint's are called, without what wraps the decoder."""
    name = f"{module}.weight"
    for pattern, replacement in renamed:
        name = re.sub(pattern, replacement, name)
    module = name.removesuffix(".weight")
    if module.endswith(HEAD):
        return HEAD
    if module.endswith("embed_tokens"):
        return EMBEDDING
    return _WRAPPERS.sub(r"model.\1", module)


def _read_pair(
    file: TensorFile, reader: TensorReader, module: _Module, config: AdapterConfig, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    rank, (rows, columns) = config.rank_of(module.name), shape
    if not 1 <= rank <= MAX_RANK:
        raise AdapterError(
            f"{WEIGHTS_NAME} has rank {rank} for {module.name[:120]!r}; ranks from 1 to {MAX_RANK} are served"
        )
    return (
        _read(file, reader, module.down, (rank, columns)),
        _read(file, reader, module.up, (rows, rank)),
    )


def _read(file: TensorFile, reader: TensorReader, name: str, shape: tuple[int, int]) -> torch.Tensor:
    stored: StoredTensor = file.tensors[name]
    if stored.shape != shape:
        own = list(stored.shape)[:8]
        raise AdapterError(
            f"{WEIGHTS_NAME} has {name[:120]!r} of shape {own}, but for this model it has to be {list(shape)}"
        )
    if stored.dtype not in _FLOATS:
        raise AdapterError(
            f"{WEIGHTS_NAME} has {name[:120]!r} in {stored.dtype}; float32, float16 and bfloat16 are read"
        )
    assert isinstance(stored.dtype, torch.dtype)
    tensor = torch.empty(shape, dtype=torch.bfloat16 if stored.dtype is torch.bfloat16 else torch.float32)
    reader.read(file, stored, tensor)
    if not bool(tensor.isfinite().all()):
        raise AdapterError(f"{WEIGHTS_NAME} has numbers in {name[:120]!r} that are not finite")
    return tensor


def _part(matrix: AdaptedMatrix, index: int, down: torch.Tensor, up: torch.Tensor, scale: float) -> LowRankPart:
    first = sum(matrix.rows[:index])
    end = first + matrix.rows[index]
    if matrix.scales is not None:
        factors = matrix.scales[first:end]
        if bool((factors != 1).any()):
            up = up.float() * factors[:, None]
            down = down.float()
    if matrix.order is None:
        return LowRankPart(down, up, scale, torch.arange(first, end))
    features = ((matrix.order >= first) & (matrix.order < end)).nonzero()[:, 0]
    return LowRankPart(down, up[matrix.order[features] - first], scale, features)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter that can be placed.

    Attributes:
        packed: Laid out as the kernels read it.
        max_rank: The largest of its ranks.
        num_bytes: What it takes in memory.
        pieces: What it adds to each matrix, encoded for the other ranks; empty where there are none.
    """

    packed: Packed
    max_rank: int
    num_bytes: int
    pieces: Sequence[bytes] = ()


def read_packed(
    directory: Path,
    targets: AdapterTargets,
    renamed: tuple[tuple[str, str], ...] = (),
    encode: Callable[[Mapping[str, LowRank]], Sequence[bytes]] = lambda _: (),
) -> PackedAdapter:
    """Read and pack an adapter for the model of `targets`, and encode it for other ranks. Any thread may do so.

    Raises:
        AdapterError: It is not served.
    """
    try:
        adapter = read_adapter(directory, targets, renamed)
    except OSError as error:
        raise AdapterError(f"{error.filename} is missing or cannot be read ({error.strerror})") from None
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    packed, pieces = targets.pack(adapter.low_ranks), encode(adapter.low_ranks)
    return PackedAdapter(packed, adapter.max_rank, adapter.num_bytes, pieces)
