"""The folder that a quantized model is written to, resumable while under work, and its tensors' names.

Under `unfinished/` lie the job's description and a folder of its own for each finished layer. At the end the layers'
files move up as shards, and `config.json` is written last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.shard_files import INDEX_FILE, SINGLE_FILE
from shared.errors import ConfigError

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class QuantizedFolder:
    """Owns the files under one folder."""

    def __init__(self, path: Path, num_layers: int) -> None:
        self._path = path
        self._work = path / "unfinished"
        self._num_layers = num_layers

    @classmethod
    def open(cls, path: Path, job: Mapping[str, str], num_layers: int) -> QuantizedFolder:
        """Take a new or empty folder, or one in which the same job began. Nothing is written before `begin`.

        Raises:
            ConfigError: The folder holds something else: a finished model, another job, or other files.
        """
        with _written_to(path):
            return cls._open(path, job, num_layers)

    @classmethod
    def _open(cls, path: Path, job: Mapping[str, str], num_layers: int) -> QuantizedFolder:
        folder = cls(path, num_layers)
        description = folder._work / "job.json"
        if description.is_file():
            begun = json.loads(description.read_text())
            differing = [name for name in job if begun.get(name) != job[name]]
            if differing:
                problem = (
                    f"{path} holds an unfinished job with another {', '.join(differing)}; delete it or go on with it"
                )
                raise ConfigError("HEADRACE_OUT", problem)
            return folder
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError("HEADRACE_OUT", f"{path} exists and is not empty; name a new folder")
        return folder

    def begin(self, job: Mapping[str, str]) -> None:
        """Make the folder and write the job's description, unless the job has begun."""
        description = self._work / "job.json"
        if description.is_file():
            return
        with _written_to(self._path):
            self._work.mkdir(parents=True, exist_ok=True)
            written = description.with_suffix(".part")
            written.write_text(json.dumps(dict(job)))
            os.replace(written, description)

    def has_layer(self, index: int) -> bool:
        """Return True when the layer has been written."""
        return (self.layer(index) / SINGLE_FILE).is_file()

    def layer(self, index: int) -> Path:
        """Return the folder of a layer, which reads like a checkpoint's."""
        return self._work / f"layer-{index:05d}"

    def write_layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a layer's tensors, which have their whole names."""
        self._write(self.layer(index), tensors)

    def write_rest(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors outside the layers."""
        self._write(self.layer(self._num_layers), tensors)

    def finish(
        self, model: Path, quantization_config: Mapping[str, object], changes: Mapping[str, object] | None = None
    ) -> None:
        """Make a model of the files; tokenizer and settings are copied from `model`, but for what `changes` says."""
        with _written_to(self._path):
            self._finish(model, quantization_config, changes or {})

    def _finish(self, model: Path, quantization_config: Mapping[str, object], changes: Mapping[str, object]) -> None:
        total, num_bytes = self._num_layers + 1, 0
        weight_map: dict[str, str] = {}
        for index in range(total):
            name = f"model-{index + 1:05d}-of-{total:05d}.safetensors"
            os.replace(self.layer(index) / SINGLE_FILE, self._path / name)
            with safe_open(self._path / name, framework="pt") as shard:
                weight_map |= dict.fromkeys(shard.keys(), name)
            num_bytes += (self._path / name).stat().st_size
        for file in _COPIED:
            if (model / file).is_file():
                shutil.copyfile(model / file, self._path / file)
        index_text = json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": weight_map}, indent=1)
        (self._path / INDEX_FILE).write_text(index_text)
        config = json.loads((model / "config.json").read_text())
        config |= {**changes, "quantization_config": dict(quantization_config)}
        (self._path / "config.json").write_text(json.dumps(config, indent=2))
        shutil.rmtree(self._work)

    def _write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        with _written_to(self._path):
            folder.mkdir(exist_ok=True)
            written = folder / f"{SINGLE_FILE}.part"
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, written, {"format": "pt"})
            # The library writes files that only their owner can read.
            written.chmod(0o644)
            os.replace(written, folder / SINGLE_FILE)


@contextmanager
def _written_to(path: Path) -> Iterator[None]:
    """Let a folder that cannot be written be the fault of the setting that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{path} cannot be written: {reason}; mend that and start the same job again, or name another folder"
        raise ConfigError("HEADRACE_OUT", problem) from error


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHT = ".weight"


class StoredNames:
    """The tensors of one checkpoint, by the engine's names for them: which are rounded, and which stay as they are.

    Families and tools name tensors differently; the engine's names (`TensorNames.own_name`) are the same for all. What
    is written has the checkpoint's names, so that whoever reads the model reads its quantized form.
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
    """Return the beginnings of both names behind which they are the same."""
    ours, theirs = own.split("."), stored.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ".".join(ours), ".".join(theirs)


def read_all(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors as they are stored."""
    return {name: checkpoint.take_raw(name) for name in names}
