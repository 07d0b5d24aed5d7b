"""From the files of an adapter to what it adds to each matrix of the model that is loaded.

The model's own matrices say what fits: a module that they do not have, or have in other sizes, is of another model, and
refused. Files are those of strangers: nothing is read that is larger than its bound, and every number is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_worker.adapters.config import AdapterConfig, AdapterError, read_config
from gpu_worker.adapters.modules import Module, common_name, experts_of, modules_of
from gpu_worker.layers.adapters import AdaptedMatrix, AdapterTargets, ExpertModules, Packed
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.tensor_file import StoredTensor, TensorFile
from gpu_worker.models.tensor_reader import TensorReader
from kernels.low_rank import LowRank, LowRankPart, whole_pages
from shared.adapter_files import CONFIG_NAME, WEIGHTS_NAME

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Besides twice as many as the model has room for. A header is decoded in one call, which keeps other threads waiting.
_MORE_TENSORS = 20_000
# Their parameters in `transformers`, in the order in which it makes them.
_STACKS = (("gate_up_proj", "up_proj"), ("down_proj",))


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


def read_adapter(directory: Path, targets: AdapterTargets, renamed: tuple[tuple[str, str], ...] = ()) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors` for the model of `targets`; `renamed` is the family's.

    Raises:
        AdapterError: It is of a kind that is not served, broken, or of another model.
        CheckpointError: A file is missing or damaged.
    """
    config = read_config(directory)
    parts: dict[str, list[LowRankPart]] = {}
    with _opened(directory, targets) as file, closing(TensorReader(torch.device("cpu"))) as reader:
        for planned in _plan(file, config, targets, renamed):
            for key, part in planned.parts(file, reader):
                parts.setdefault(key, []).append(part)
    return Adapter(
        {
            key: LowRank(tuple(own), targets.matrices[key].shape, targets.matrices[key].is_gated)
            for key, own in parts.items()
        }
    )


def check_adapter(directory: Path, targets: AdapterTargets, renamed: tuple[tuple[str, str], ...] = ()) -> None:
    """Raise `AdapterError` for an adapter that its configuration or its header already rules out.

    No number is read: there may be zeros in their place.
    """
    with _sentences():
        config = read_config(directory)
        with _opened(directory, targets) as file:
            _plan(file, config, targets, renamed)


def _opened(directory: Path, targets: AdapterTargets) -> closing[TensorFile]:
    return closing(TensorFile(directory / WEIGHTS_NAME, _max_tensors(targets)))


def _plan(
    file: TensorFile, config: AdapterConfig, targets: AdapterTargets, renamed: tuple[tuple[str, str], ...]
) -> list[_Pair | _Stack]:
    """Return the matrices to read, after a check of every tensor's shape and type."""
    modules = modules_of(file, renamed, targets)
    config.check_patterns(len(modules))
    if not modules:
        raise AdapterError(f"{WEIGHTS_NAME} has no matrices")
    places: dict[str, list[tuple[str, int]]] = {}
    for key, item in targets.matrices.items():
        for index, name in enumerate(item.modules):
            places.setdefault(common_name(name), []).append((key, index))
    pairs: list[_Pair] = []
    stacks: list[_Stack] = []
    for name, module in modules.items():
        if name not in places:
            stacks.append(_Stack.of(file, module, experts_of(name, module, targets), config))
        for key, index in places.get(name, ()):
            pairs.append(_Pair.of(file, module, key, targets.matrices[key], index, config))
    is_turned = next((stack.is_turned for stack in stacks if stack.is_turned is not None), None)
    for stack in stacks:
        if is_turned is None:
            problem = "is beside square matrices of experts: nothing tells which side their inputs are"
            raise AdapterError(f"{WEIGHTS_NAME} has {stack.module.down[:120]!r}, which {problem}")
        stack.check(file, is_turned)
    return [*pairs, *(replace(stack, is_turned=is_turned) for stack in stacks)]


def _max_tensors(targets: AdapterTargets) -> int:
    num_modules = sum(len(matrix.modules) for matrix in targets.matrices.values())
    num_modules += sum(len(layer.experts) * len(layer.matrices) for layer in targets.experts.values() if layer)
    return _MORE_TENSORS + 4 * num_modules


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stack of experts' matrices that an adapter is beside: all first ones, or all last ones.

    Files name no parameter, and some releases of PEFT take the first dimension of each matrix for the inputs. Shapes
    tell which stack it is, except for experts without a gate, and whether that dimension is the outputs, except for
    square matrices: other stacks of the file tell it for those.

    Attributes:
        shape: Of each matrix: outputs and inputs.
        name: The matrix of an expert that it is, or the first of those.
        rank, scale: Of each expert.
        is_turned: The first dimension is the outputs; None is unknown.
    """

    module: Module
    experts: ExpertModules
    shape: tuple[int, int]
    name: str
    rank: int
    scale: float
    is_turned: bool | None

    @classmethod
    def of(cls, file: TensorFile, module: Module, experts: ExpertModules, config: AdapterConfig) -> _Stack:
        """Find which one it is; `AdapterError` if it is none, or may be either."""
        *firsts, last = experts.matrices
        shapes = {firsts[0]: (len(firsts) * experts.inner_size, experts.size), last: (experts.size, experts.inner_size)}
        found = file.tensors[module.up].shape[:1] + file.tensors[module.down].shape[1:]
        fitting = [name for name, shape in shapes.items() if found in (shape, shape[::-1])]
        if len(fitting) > 1 and (place := _place_of(file, module, config)) is not None:
            fitting = [fitting[place]]
        if len(fitting) == 1:
            shape, name = shapes[fitting[0]], fitting[0]
            of = config.stack_name(module.name.partition(".base_layer")[0], _STACKS[0 if name == firsts[0] else 1])
            is_turned = None if shape[0] == shape[1] else found != shape
            return cls(module, experts, shape, name, config.rank_of(of), config.scale_of(of), is_turned)
        problem = f"beside matrices of {list(found)}, which are those of the first and of the last projection of this "
        problem += f"model's experts: target_parameters of {CONFIG_NAME} has to name the one that was trained"
        if not fitting:
            allowed = " and ".join(str(list(shape)) for shape in shapes.values())
            problem = f"beside matrices of {list(found)}; those of this model's experts are {allowed}"
        raise AdapterError(f"{WEIGHTS_NAME} has {module.down[:120]!r}, {problem}")

    def _shapes(self, is_turned: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        count, (rows, columns) = len(self.experts.experts), self.shape[::-1] if is_turned else self.shape
        return (count * self.rank, columns), (rows, self.rank * count)

    def check(self, file: TensorFile, is_turned: bool) -> None:
        """Raise `AdapterError` if its tensors have other shapes or types."""
        for name, shape in zip((self.module.down, self.module.up), self._shapes(is_turned), strict=True):
            _check_tensor(file, name, shape)

    def parts(self, file: TensorFile, reader: TensorReader) -> Iterator[tuple[str, LowRankPart]]:
        """Yield the update of each expert's matrix, by the matrix.

        The ranks of an expert stand together in the first matrix, and those of all experts alternate in the second.
        """
        assert self.is_turned is not None
        count, rank, is_first = len(self.experts.experts), self.rank, self.name == self.experts.matrices[0]
        down, up = _read_both(file, reader, self.module)
        down, up = down.view(count, rank, -1), up.view(-1, rank, count).permute(2, 0, 1)
        if self.is_turned:
            down, up = up.transpose(1, 2), down.transpose(1, 2)
        num_firsts = len(self.experts.matrices) - 1
        if self.experts.is_interleaved and is_first:
            up = torch.cat([up[:, start::num_firsts] for start in range(num_firsts)], dim=1)
        features = torch.arange(self.shape[0])
        for number, expert in enumerate(self.experts.experts):
            part = LowRankPart(down[number].contiguous(), up[number].contiguous(), self.scale, features)
            yield f"{expert}.{self.name}", part


def _place_of(file: TensorFile, module: Module, config: AdapterConfig) -> int | None:
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


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two matrices of a module that is the part `index` of a matrix of the model."""

    module: Module
    key: str
    matrix: AdaptedMatrix
    index: int
    scale: float

    @classmethod
    def of(
        cls, file: TensorFile, module: Module, key: str, matrix: AdaptedMatrix, index: int, config: AdapterConfig
    ) -> _Pair:
        """Check the shapes and types of both; `AdapterError` if they do not fit."""
        rank = config.rank_of(module.name)
        _check_tensor(file, module.down, (rank, matrix.columns))
        _check_tensor(file, module.up, (matrix.rows[index], rank))
        return cls(module, key, matrix, index, config.scale_of(module.name))

    def parts(self, file: TensorFile, reader: TensorReader) -> Iterator[tuple[str, LowRankPart]]:
        """Yield its update, by the matrix."""
        down, up = _read_both(file, reader, self.module)
        yield self.key, _part(self.matrix, self.index, down, up, self.scale)


def _check_tensor(file: TensorFile, name: str, shape: tuple[int, int]) -> None:
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


def _read_both(file: TensorFile, reader: TensorReader, module: Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Read both matrices of a module, in float32 unless both are bfloat16: neither is rounded to the other's type."""
    down, up = (_read(file, reader, name) for name in (module.down, module.up))
    return (down, up) if down.dtype is up.dtype else (down.float(), up.float())


def _read(file: TensorFile, reader: TensorReader, name: str) -> torch.Tensor:
    stored = file.tensors[name]
    tensor = torch.empty(stored.shape, dtype=torch.bfloat16 if stored.dtype is torch.bfloat16 else torch.float32)
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
    with _sentences():
        adapter = read_adapter(directory, targets, renamed)
    packed, pieces = targets.pack(adapter.low_ranks), encode(adapter.low_ranks)
    return PackedAdapter(packed, adapter.max_rank, adapter.num_bytes, pieces)


@contextmanager
def _sentences() -> Iterator[None]:
    """Raise errors of files as `AdapterError`."""
    try:
        yield
    except OSError as error:
        # Clients read these: the file's name alone, since its directory is the worker's own.
        raise AdapterError(
            f"{Path(error.filename or WEIGHTS_NAME).name} is missing or cannot be read ({error.strerror})"
        ) from None
    except CheckpointError as error:
        raise AdapterError(f"{error.path.name}: {error.problem}") from None
