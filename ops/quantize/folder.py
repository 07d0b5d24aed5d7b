"""The folder that a quantized model is written to, and its tensors' names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.tensor_file import INDEX_FILE
from shared.errors import ConfigError

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class QuantizedFolder:
    """Owns the files under one folder: a shard for each layer and one for the rest, and last `config.json`."""

    def __init__(self, path: Path, num_layers: int) -> None:
        """Take a new or empty folder. Nothing is written yet."""
        self._path = path
        self._num_shards = num_layers + 1
        self._weight_map: dict[str, str] = {}
        self._num_bytes = 0
        with _written_to(path):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ConfigError("HEADRACE_OUT", f"{path} exists and is not empty; name a new folder")

    def write_layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a layer's tensors, which have their whole names."""
        name = f"model-{index + 1:05d}-of-{self._num_shards:05d}.safetensors"
        file = self._path / name
        with _written_to(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
            # The library writes files that only their owner can read.
            file.chmod(0o644)
            self._num_bytes += file.stat().st_size
        self._weight_map |= dict.fromkeys(tensors, name)

    def write_rest(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors outside the layers."""
        self.write_layer(self._num_shards - 1, tensors)

    def finish(self, model: Path, quantization_config: Mapping[str, object], changes: Mapping[str, object]) -> None:
        """Make a model of the files; tokenizer and settings are copied from `model`, but for what `changes` says."""
        with _written_to(self._path):
            for file in _COPIED:
                if (model / file).is_file():
                    shutil.copyfile(model / file, self._path / file)
            facts = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._weight_map}
            (self._path / INDEX_FILE).write_text(json.dumps(facts, indent=1))
            config = json.loads((model / "config.json").read_text())
            config |= {**changes, "quantization_config": dict(quantization_config)}
            (self._path / "config.json").write_text(json.dumps(config, indent=2))


@contextmanager
def _written_to(path: Path) -> Iterator[None]:
    """Let a folder that cannot be written be the fault of the setting that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{path} cannot be written: {reason}; mend that, or name another folder"
        raise ConfigError("HEADRACE_OUT", problem) from error


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHT = ".weight"


class StoredNames:
    """The tensors of one checkpoint, by the engine's names for them: which are rounded, and which stay as they are.

    Families and tools name tensors differently; the engine's names (`TensorNames.own_name`) are the same for all. The
    output keeps the checkpoint's names, so every reader of the model can read its quantized form.
    """

    def __init__(self, stored: Iterable[str], config: ModelConfig) -> None:
        self._config = config
        self._names = config.block.names
        self._stored: Mapping[str, str] = {self._names.own_name(name): name for name in stored}
        # From the beginnings of own names to those of stored ones, where what follows is the same.
        self._roots = dict(_roots(own, name) for own, name in self._stored.items())

    def module(self, own: str) -> str:
        """Return the checkpoint's name of a module, also of one that it does not have, such as an expert's."""
        if f"{own}{_WEIGHT}" in self._stored:
            return self._stored[f"{own}{_WEIGHT}"].removesuffix(_WEIGHT)
        parts = own.split(".")
        for count in range(len(parts), 0, -1):
            root = ".".join(parts[:count])
            if root in self._roots:
                return ".".join([self._roots[root], *parts[count:]])
        return own

    def of_layer(self, index: int, rounded: Iterable[str]) -> list[str]:
        """Return the tensors of a layer that stay, in the checkpoint's names; `rounded` are own names of modules."""
        prefix = f"model.layers.{index}."
        gone = {f"{module}{_WEIGHT}" for module in rounded}
        experts = tuple(f"{prefix}{name}" for name in _expert_names(self._config, index))
        return [
            stored
            for own, stored in self._stored.items()
            if own.startswith(prefix) and own not in gone and not own.startswith(experts)
        ]

    def outside_layers(self, *, has_head: bool) -> list[str]:
        """Return the tensors outside of the layers, but for a head that is rounded."""
        return [
            stored
            for own, stored in self._stored.items()
            if not self._is_in_layer(own) and not (has_head and own == f"lm_head{_WEIGHT}")
        ]

    def left_alone(self, checkpoint: Checkpoint) -> list[str]:
        """Return modules with matrices that belong to no layer of the decoder: readers must not look for scales."""
        unused = [stored for own, stored in self._stored.items() if self._names.is_unused(own)]
        matrices = [name for name in unused if name.endswith(_WEIGHT) and len(checkpoint.shape(name)) > 1]
        return [name.removesuffix(_WEIGHT) for name in matrices]

    def _is_in_layer(self, own: str) -> bool:
        match = _LAYER.match(own)
        return match is not None and int(match[1]) < self._config.num_layers


def _expert_names(config: ModelConfig, index: int) -> list[str]:
    """Return the beginning of the names of experts' matrices, within the layer."""
    shape = config.layer(index).mixture
    if shape is None:
        return []
    stacked = [name for pair in shape.names.stacked for name in pair]
    return [*(f"{name}." for name in shape.names.experts), *stacked]


def _roots(own: str, stored: str) -> tuple[str, str]:
    ours, theirs = own.split("."), stored.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ".".join(ours), ".".join(theirs)


def read_all(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors as they are stored."""
    return {name: checkpoint.take_raw(name) for name in names}
