"""The files of a model for sentence-transformers: modules, matrices behind the pooling, settings of rerankers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from gpu_worker.models.json_file import read_small_file
from gpu_worker.text.model_directory import read_json
from shared.errors import ConfigError

_RERANKER = "CrossEncoder"
# Files of the first module; older models have them under other names than BERT's.
_TRANSFORMER_FILES = "sentence_*_config.json"


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules of sentence-transformers, in order: the class of each, and the folder with its configuration."""

    modules: tuple[tuple[str, Path], ...]

    @classmethod
    def read(cls, directory: Path) -> SentenceModules | None:
        """Read `modules.json`; None where there is none, `ConfigError` if it is not usable."""
        entries = read_json(directory / "modules.json", kind=list)
        if not entries:
            return None
        # A folder of the model's own, whatever the file says.
        folders = [(class_name(entry.get("type")), _folder(entry.get("path", ""))) for entry in entries]
        return cls(tuple((name, directory / folder) for name, folder in folders))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the classes, in order."""
        return tuple(name for name, _ in self.modules)

    def max_tokens(self) -> int | None:
        """Return how many tokens of a text the model reads; None leaves it to the tokenizer's files."""
        limits = (settings.get("max_seq_length") for settings in self._transformer_settings())
        return next((limit for limit in limits if type(limit) is int and limit > 0), None)

    @property
    def lowers_case(self) -> bool:
        """Return True if texts are written in small letters before they are read."""
        return any(settings.get("do_lower_case") is True for settings in self._transformer_settings())

    def _transformer_settings(self) -> list[dict[str, Any]]:
        folders = self.folders("Transformer")[:1]
        return [read_json(file) for folder in folders for file in sorted(folder.glob(_TRANSFORMER_FILES))]

    def folders(self, name: str) -> list[Path]:
        """Return the folders of the modules of this class, in order."""
        return [folder for given, folder in self.modules if given == name]

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration of the last module of this class."""
        return read_json(self.folders(name)[-1] / "config.json")


@dataclass(frozen=True, slots=True)
class RerankerSettings:
    """A reranker's `activation`, in small letters, and its default `instruction`, if any."""

    activation: str
    instruction: str | None = None

    @classmethod
    def read(cls, directory: Path, config: dict[str, Any]) -> RerankerSettings:
        """Read `config_sentence_transformers.json`, or older fields of `config.json`; the default is the sigmoid."""
        settings = read_json(directory / "config_sentence_transformers.json")
        if settings.get("model_type", _RERANKER) != _RERANKER:
            # Those of a model that makes vectors: its prompts are for these.
            settings = {}
        older = config.get("sentence_transformers")
        named = settings.get("activation_fn")
        named = named or (older.get("activation_fn") if isinstance(older, dict) else None)
        named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
        prompts = settings.get("prompts")
        prompt = prompts.get(str(settings.get("default_prompt_name"))) if isinstance(prompts, dict) else None
        return cls(class_name(named).lower(), prompt if isinstance(prompt, str) and prompt else None)


def read_prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    """Return what a model that makes vectors reads before texts, by use, and the name of the use of other texts.

    Raises:
        ConfigError: The file is not usable.
    """
    settings = read_json(directory / "config_sentence_transformers.json")
    if settings.get("model_type") == _RERANKER:
        return {}, None
    prompts, default = settings.get("prompts"), settings.get("default_prompt_name")
    named = prompts.items() if isinstance(prompts, dict) else ()
    texts = {str(name): prompt for name, prompt in named if isinstance(prompt, str)}
    return texts, default if isinstance(default, str) and default else None


def class_name(path: object) -> str:
    """Return the last part of a dotted name."""
    return str(path).rsplit(".", 1)[-1]


def _folder(path: object) -> str:
    name = Path(str(path)).name
    return "" if name == ".." else name


Vector = npt.NDArray[np.float64]

_FILE = "model.safetensors"
_MAX_SIDE = 1 << 16
_MAX_FILE_BYTES = 1 << 30
_TYPES: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class DenseModule:
    """A `Dense` module: `weight: [out_features, in_features]`, `bias: [out_features]`, float32, and a function."""

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
    """Read a module of `in_features` from its folder, or return why it is not served; may raise `ConfigError`."""
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
    """Read a safetensors file of a few matrices, without torch."""
    try:
        entries = deserialize(read_small_file(path, _MAX_FILE_BYTES))  # type: ignore[no-untyped-call]
        return {name: _array(entry["data"], entry["dtype"], entry["shape"]) for name, entry in entries}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        problem = f"{path} is not usable ({error}); copy it again from where the model came from"
        raise ConfigError("HEADRACE_MODEL", problem) from None


def _array(data: bytes, dtype: str, shape: list[int]) -> npt.NDArray[np.float32]:
    if not all(0 < side <= _MAX_SIDE for side in shape):
        raise ValueError(f"a tensor has shape {shape}")
    stored: npt.NDArray[Any] = np.frombuffer(data, dtype=_TYPES[dtype])
    if dtype == "BF16":
        # The upper half of the same number in 32 bits.
        stored = (stored.astype("<u4") << 16).view("<f4")
    return stored.astype(np.float32).reshape(shape)
