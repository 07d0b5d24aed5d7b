"""The matrices that some models of sentence-transformers have behind their pooling (`Dense` in `modules.json`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gpu_worker.models.small_file import read_small_file
from gpu_worker.text.model_directory import read_json
from shared.errors import ConfigError
from shared.messages import UNDECODABLE

Vector = npt.NDArray[np.float64]

_FILE = "model.safetensors"
_MAX_SIDE = 1 << 16
_MAX_FILE_BYTES = 1 << 30
_TYPES: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Entry(msgspec.Struct):
    """What a safetensors header says of a tensor; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class DenseModule:
    """A matrix, a bias and a function, which are applied to a text's vector.

    Attributes:
        weight: `[out_features, in_features]` float32.
        bias: `[out_features]` float32; None where there is none.
        activation: Applied to what comes out.
    """

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None
    activation: Callable[[Vector], Vector]

    def __call__(self, values: Vector) -> Vector:
        """Return the vector of `out_features` numbers that comes out of one of `in_features`."""
        out = self.weight @ values
        return self.activation(out if self.bias is None else out + self.bias)


def _identity(values: Vector) -> Vector:
    return values


_ACTIVATIONS: dict[str, Callable[[Vector], Vector]] = {"Identity": _identity, "Tanh": np.tanh}


def read_dense(folder: Path, in_features: int) -> DenseModule | str:
    """Read one module from its folder, or return why it is not served.

    Args:
        folder: Holds `config.json` and `model.safetensors`.
        in_features: Numbers of the vectors that it is given.

    Raises:
        ConfigError: A file is not usable.
    """
    config = read_json(folder / "config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS:
        return f"its {folder.name} ends with {name}; served are {' and '.join(_ACTIVATIONS)}"
    if not (folder / _FILE).is_file():
        return f"its {folder.name} has no {_FILE}; save the model again with sentence-transformers 3 or later"
    tensors = _read_tensors(folder / _FILE)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != in_features:
        shape = "missing" if weight is None else f"of shape {list(weight.shape)}"
        problem = f"linear.weight in {folder / _FILE} is {shape}; it must take {in_features} numbers"
        raise ConfigError("HEADRACE_MODEL", problem)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError("HEADRACE_MODEL", f"linear.bias in {folder / _FILE} is of shape {list(bias.shape)}")
    return DenseModule(weight, bias, _ACTIVATIONS[name])


def _read_tensors(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Read a safetensors file of a few matrices, without torch.

    Raises:
        ConfigError: It is not a whole file of floating point numbers.
    """
    try:
        data = read_small_file(path, _MAX_FILE_BYTES)
        start = 8 + int.from_bytes(data[:8], "little")
        fields = msgspec.json.decode(data[8:start], type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items() if name != "__metadata__"
        }
        return {name: _array(data[start:], entry) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, *UNDECODABLE) as error:
        problem = f"{path} is not usable ({error}); copy it again from where the model came from"
        raise ConfigError("HEADRACE_MODEL", problem) from None


def _array(data: bytes, entry: _Entry) -> npt.NDArray[np.float32]:
    first, end = entry.data_offsets
    if not all(0 < side <= _MAX_SIDE for side in entry.shape):
        raise ValueError(f"a tensor has shape {list(entry.shape)}")
    stored: npt.NDArray[Any] = np.frombuffer(data[first:end], dtype=_TYPES[entry.dtype])
    if stored.size != math.prod(entry.shape):
        raise ValueError("a tensor has not as many numbers as its shape says")
    if entry.dtype == "BF16":
        # The upper half of the same number in 32 bits.
        stored = (stored.astype("<u4") << 16).view("<f4")
    return stored.astype(np.float32).reshape(entry.shape)
