"""From the files of an adapter to what it adds to each matrix of the model that is loaded.

The model's own matrices say what fits: a module that they do not have, or have in other sizes, is of another model, and
refused. Files are those of strangers: nothing is read that is larger than its bound, and every number is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.adapters.config import MAX_RANK, AdapterConfig, AdapterError, read_config
from gpu_worker.layers.adapters import EMBEDDING, HEAD, AdaptedMatrix, AdapterTargets, ExpertModules, Packed
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.tensor_file import StoredTensor, TensorFile
from gpu_worker.models.tensor_reader import TensorReader
from gpu_worker.models.text_part import TOWERS
from kernels.low_rank import LowRank, LowRankPart, whole_pages
from shared.adapter_store import CONFIG_NAME, WEIGHTS_NAME

_ROOT = "base_model.model."
_TENSOR = re.compile(r"(.+?)\.lora_(embedding_)?([AB])(\.default)?(\.weight)?")
# PEFT saves a copy of the model's own embedding or head beside an adapter of it.
_COPY = re.compile(r"(.+?)\.base_layer\.(weight|bias)")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Besides twice as many as the model has room for. A header is decoded in one call, which keeps other threads waiting.
_MORE_TENSORS = 20_000
# Some of the expressions here take the square of a name's length.
_MAX_NAME = 512
# A matrix of one expert, or the stack of all of them, which PEFT's `target_parameters` names.
_EXPERTS = re.compile(r"(model\.layers\.\d+)\.(?:.+\.)?experts(\.\d+\..*|(?:\.base_layer)*)")
# Their parameters in `transformers`, in the order in which it makes them.
_STACKS = (("gate_up_proj", "up_proj"), ("down_proj",))
# What stands before the layers in models that wrap a decoder of text.
_WRAPPERS = re.compile(r"^(?:.*\.)?(layers\.\d+\.|embed_tokens$|per_layer_model_projection$)")
_TOWER = re.compile("|".join(TOWERS))
# Routers have other names in checkpoints than in `transformers`.
_ROUTER = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.(?:gate|router)(?:\.layer)?")
# What latent attention multiplies into queries and values.
_ABSORBED = re.compile(r"model\.layers\.\d+\.self_attn\.kv_b_proj")


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
        """Return the memory that it takes, in whole pages."""
        return whole_pages(sum(low_rank.num_bytes for low_rank in self.low_ranks.values()))


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
    file = TensorFile(directory / WEIGHTS_NAME, _max_tensors(targets))
    with closing(file), closing(TensorReader(torch.device("cpu"))) as reader:
        modules = _modules(file, renamed, targets)
        config.check_patterns(len(modules))
        places: dict[str, list[tuple[str, int]]] = {}
        for key, item in targets.matrices.items():
            for index, name in enumerate(item.modules):
                places.setdefault(_common(name), []).append((key, index))
        parts: dict[str, list[LowRankPart]] = {}
        stacks: list[_Stack] = []
        for name, module in modules.items():
            if name not in places:
                stacks.append(_Stack.of(file, module, _experts_of(name, module, targets), config))
            for key, index in places.get(name, ()):
                matrix = targets.matrices[key]
                pair = _read_pair(file, reader, module, config, (matrix.rows[index], matrix.columns))
                parts.setdefault(key, []).append(_part(matrix, index, *pair, config.scale_of(module.name)))
        is_turned = next((stack.is_turned for stack in stacks if stack.is_turned is not None), None)
        for stack in stacks:
            if is_turned is None:
                problem = "is beside square matrices of experts: nothing tells which side their inputs are"
                raise AdapterError(f"{WEIGHTS_NAME} has {stack.module.down[:120]!r}, which {problem}")
            for key, part in stack.parts(file, reader, config, is_turned):
                parts.setdefault(key, []).append(part)
    found = {
        key: LowRank(tuple(own), targets.matrices[key].shape, targets.matrices[key].is_gated)
        for key, own in parts.items()
    }
    if not found:
        raise AdapterError(f"{WEIGHTS_NAME} has no matrices")
    return Adapter(found)


def _max_tensors(targets: AdapterTargets) -> int:
    num_modules = sum(len(matrix.modules) for matrix in targets.matrices.values())
    num_modules += sum(len(layer.experts) * len(layer.matrices) for layer in targets.experts.values() if layer)
    return _MORE_TENSORS + 4 * num_modules


def _modules(file: TensorFile, renamed: tuple[tuple[str, str], ...], targets: AdapterTargets) -> dict[str, _Module]:
    found: dict[str, dict[str, str]] = {}
    embeddings = set()
    for tensor in _own_tensors(file, renamed, targets):
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


def _own_tensors(file: TensorFile, renamed: tuple[tuple[str, str], ...], targets: AdapterTargets) -> list[str]:
    if any(len(tensor) > _MAX_NAME for tensor in file.tensors):
        raise AdapterError(f"{WEIGHTS_NAME} has a name of more than {_MAX_NAME} characters, which no module has")
    return [tensor for tensor in file.tensors if not _is_copy(file, tensor, renamed, targets)]


def _is_copy(file: TensorFile, tensor: str, renamed: tuple[tuple[str, str], ...], targets: AdapterTargets) -> bool:
    """Return whether a tensor is the model's own embedding or head; `AdapterError` if that has other sizes here."""
    match = _COPY.fullmatch(tensor)
    name = None if match is None else _own_name(match[1].removeprefix(_ROOT), renamed)
    if match is None or name not in (EMBEDDING, HEAD) or name not in targets.matrices:
        return False
    matrix = targets.matrices[name]
    sizes = (sum(matrix.rows), matrix.columns)
    shape = (sizes[::-1] if name == EMBEDDING else sizes)[: 2 if match[2] == "weight" else 1]
    if (own := file.tensors[tensor].shape) != shape:
        problem = f"of shape {list(own)[:8]}, but that of this model has {list(shape)}: it was resized, or is another's"
        raise AdapterError(f"{WEIGHTS_NAME} has {tensor[:120]!r} {problem}")
    return True


def _own_name(module: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """Return what the model calls a module: as its own checkpoint's are called, without what wraps the decoder.

    Raises:
        AdapterError: It is not of the text part. Layers of towers may have the same names as those of the decoder.
    """
    name = f"{module}.weight"
    for pattern, replacement in renamed:
        name = re.sub(pattern, replacement, name)
    if _TOWER.fullmatch(name):
        problem = "which is not of the model's text part: train an adapter of that alone, without towers and projectors"
        raise AdapterError(f"{WEIGHTS_NAME} has {module[:120]!r}, {problem}")
    module = name.removesuffix(".weight")
    if module.endswith(HEAD):
        return HEAD
    if module.endswith("embed_tokens"):
        return EMBEDDING
    return _common(_WRAPPERS.sub(r"model.\1", module))


def _common(module: str) -> str:
    """Return a name that is the same whatever the router of a layer is called."""
    match = _ROUTER.fullmatch(module)
    return module if match is None else f"{match[1]}.router"


def _experts_of(name: str, module: _Module, targets: AdapterTargets) -> ExpertModules:
    """Return the experts whose stack a module is that is none of the model's matrices."""
    problem = "but the model has no such linear layer that an adapter can be beside; was it made for another?"
    match = _EXPERTS.fullmatch(name)
    if _ABSORBED.fullmatch(name):
        problem = "but no adapter can be beside the kv_b_proj of latent attention: train it without"
    if match is not None and match[1] in targets.experts:
        experts, is_stack = targets.experts[match[1]], not re.match(r"\.\d", match[2])
        if experts is not None and is_stack:
            return experts
        if experts is None:
            problem = "but experts cannot have adapters on a GPU: serve it on CPUs, or train it without them"
    raise AdapterError(f"{WEIGHTS_NAME} has {module.down[:120]!r}, {problem}")


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stack of experts' matrices that an adapter is beside: all first ones, or all last ones.

    Files name no parameter, and some releases of PEFT take the first dimension of each matrix for the inputs. Shapes
    tell which stack it is, except for experts without a gate, and whether that dimension is the outputs, except for
    square matrices: other stacks of the file tell it for those.

    Attributes:
        shape: Of each matrix: outputs and inputs.
        name: The matrix of an expert that it is, or the first of those.
        is_turned: The first dimension is the outputs; None is unknown.
    """

    module: _Module
    experts: ExpertModules
    shape: tuple[int, int]
    name: str
    is_turned: bool | None

    @classmethod
    def of(cls, file: TensorFile, module: _Module, experts: ExpertModules, config: AdapterConfig) -> _Stack:
        """Find which one it is; `AdapterError` if it is none, or may be either."""
        *firsts, last = experts.matrices
        shapes = {firsts[0]: (len(firsts) * experts.inner_size, experts.size), last: (experts.size, experts.inner_size)}
        found = file.tensors[module.up].shape[:1] + file.tensors[module.down].shape[1:]
        fitting = [name for name, shape in shapes.items() if found in (shape, shape[::-1])]
        if len(fitting) > 1 and (place := _place_of(file, module, config)) is not None:
            fitting = [fitting[place]]
        if len(fitting) == 1:
            shape = shapes[fitting[0]]
            return cls(module, experts, shape, fitting[0], None if shape[0] == shape[1] else found != shape)
        problem = f"beside matrices of {list(found)}, which are those of the first and of the last projection of this "
        problem += f"model's experts: target_parameters of {CONFIG_NAME} has to name the one that was trained"
        if not fitting:
            allowed = " and ".join(str(list(shape)) for shape in shapes.values())
            problem = f"beside matrices of {list(found)}; those of this model's experts are {allowed}"
        raise AdapterError(f"{WEIGHTS_NAME} has {module.down[:120]!r}, {problem}")

    def parts(
        self, file: TensorFile, reader: TensorReader, config: AdapterConfig, is_turned: bool
    ) -> Iterator[tuple[str, LowRankPart]]:
        """Yield the update of each expert's matrix, by the matrix.

        The ranks of an expert stand together in the first matrix, and those of all experts alternate in the second.
        """
        count, is_first = len(self.experts.experts), self.name == self.experts.matrices[0]
        of = config.stack_name(self.module.name.partition(".base_layer")[0], _STACKS[0 if is_first else 1])
        rank, (rows, columns) = config.rank_of(of), self.shape[::-1] if is_turned else self.shape
        down = _read(file, reader, self.module.down, (count * rank, columns)).view(count, rank, columns)
        up = _read(file, reader, self.module.up, (rows, rank * count)).view(rows, rank, count).permute(2, 0, 1)
        if is_turned:
            down, up = up.transpose(1, 2), down.transpose(1, 2)
        num_firsts = len(self.experts.matrices) - 1
        if self.experts.is_interleaved and is_first:
            up = torch.cat([up[:, start::num_firsts] for start in range(num_firsts)], dim=1)
        features, scale = torch.arange(self.shape[0]), config.scale_of(of)
        for number, expert in enumerate(self.experts.experts):
            part = LowRankPart(down[number].contiguous(), up[number].contiguous(), scale, features)
            yield f"{expert}.{self.name}", part


def _place_of(file: TensorFile, module: _Module, config: AdapterConfig) -> int | None:
    """Return which of `_STACKS` an adapter is beside; None if its files do not tell.

    PEFT wraps one parameter after the other, so the first one of two is inside.
    """
    inside = ".base_layer"
    name, lora, rest = module.down.partition(".lora_A")
    if name + inside + lora + rest in file.tensors:
        return 1
    if name.endswith(inside) and name.removesuffix(inside) + lora + rest in file.tensors:
        return 0
    of = module.name.partition(inside)[0]
    found = [place for place, own in enumerate(_STACKS) if any(config.is_target(f"{of}.{each}") for each in own)]
    return found[0] if len(found) == 1 else None


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
        # Clients read these: the file's name alone, since its directory is the worker's own.
        raise AdapterError(
            f"{Path(error.filename or WEIGHTS_NAME).name} is missing or cannot be read ({error.strerror})"
        ) from None
    except CheckpointError as error:
        raise AdapterError(f"{error.path.name}: {error.problem}") from None
    packed, pieces = targets.pack(adapter.low_ranks), encode(adapter.low_ranks)
    return PackedAdapter(packed, adapter.max_rank, adapter.num_bytes, pieces)
