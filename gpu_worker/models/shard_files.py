"""The safetensors files of a model directory, by the tensors that they hold, and the names that tensors get.

The caller closes the files, by the `ExitStack` that it passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.tensor_file import TensorFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A name inside the directory: no separator, so that an index cannot point elsewhere.
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")

# What a checkpoint of layers alone calls its tensors, without the name of the model around them.
_BARE_NAMES = ("embed_tokens.", "layers.", "norm.")
_BARE_EMBEDDING, _ROOT = "embed_tokens.weight", "model."

# What the matrix of a module is called, whichever way it is stored.
_MATRICES = ("weight", "qweight", "weight_packed")

_ENCODER_ROOT = re.compile(r"^(bert|roberta)\.")

Renaming = Sequence[tuple[str, str]]


def open_shards(directory: Path, opened: ExitStack) -> dict[str, TensorFile]:
    """Map tensor names to their open files: a single one, or an index and its shards.

    `opened` closes the files. A file that is missing, damaged, or outside the directory is a `CheckpointError`.
    """
    path = directory / SINGLE_FILE
    if path.exists() or not (directory / INDEX_FILE).exists():
        file = _open(path, opened)
        return dict.fromkeys(file.tensors, file)
    index = JsonFile.read(directory / INDEX_FILE)
    weight_map = index.nested("weight_map")
    if weight_map is None or not weight_map.names():
        raise index.error("weight_map", "is missing")
    shard_names = {name: weight_map.text(name) for name in sorted(weight_map.names())}
    shards = {name: _open(_shard_path(index, name), opened) for name in sorted(set(shard_names.values()))}
    for name, shard in shard_names.items():
        if name not in shards[shard].tensors:
            raise CheckpointError(shards[shard].path, f"does not hold tensor {name!r}, although the index says so")
    return {name: shards[shard] for name, shard in shard_names.items()}


def _shard_path(index: JsonFile, name: str) -> Path:
    if not _SHARD_NAME.fullmatch(name):
        problem = f"names file {name[:80]!r}; only *.safetensors files in the model's own directory are read"
        raise index.error("weight_map", problem)
    return index.path.parent / name


def _open(path: Path, opened: ExitStack) -> TensorFile:
    file = TensorFile(path)
    opened.callback(file.close)
    return file


def own_names(stored: Iterable[str], patterns: Renaming, *, adds_root: bool) -> dict[str, str]:
    """Return the name that each stored tensor gets: by `patterns` in this order; `adds_root` as of `Checkpoint`."""
    names = {name: name for name in stored}
    for pattern, replacement in patterns:
        names = {name: re.sub(pattern, replacement, own) for name, own in names.items()}
    if not adds_root:
        return names
    rooted = _rooted if _BARE_EMBEDDING in names.values() else _encoder_name
    return {name: rooted(own) for name, own in names.items()}


def check_distinct(directory: Path, names: Mapping[str, str]) -> None:
    """Raise `CheckpointError` if two of the used tensors get the same name."""
    stored_as: dict[str, str] = {}
    for stored, own in names.items():
        other = stored_as.setdefault(own, stored)
        if other != stored:
            problem = f"holds {other!r} and {stored!r}, which are both the model's {own!r}; remove one of them"
            raise CheckpointError(directory, problem)


def with_names(shards: dict[str, TensorFile], names: Mapping[str, str]) -> dict[str, TensorFile]:
    """Call tensors by other names, in the files too; `CheckpointError` if two tensors then have the same name."""
    first: dict[str, str] = {}
    for stored, own in names.items():
        if (other := first.setdefault(own, stored)) != stored:
            problem = f"holds tensor {stored!r}, which is the same of the model as {other!r}; copy the files again"
            raise CheckpointError(shards[stored].path, problem)
    for file in set(shards.values()):
        file.rename(lambda name: names.get(name, name))
    return {names[name]: file for name, file in shards.items()}


def stored_modules(names: Mapping[str, str]) -> dict[str, str]:
    """Return the checkpoint's names of modules that have a matrix, by their own names."""
    modules = {}
    for stored, own in names.items():
        module, _, kind = own.rpartition(".")
        if kind in _MATRICES:
            modules[module] = stored.rpartition(".")[0]
    return modules


def _rooted(name: str) -> str:
    return _ROOT + name if name.startswith(_BARE_NAMES) else name


def _encoder_name(name: str) -> str:
    """Return what an encoder's tensor is called without the name of the model around it, and of its first release."""
    name = _ENCODER_ROOT.sub("", name)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
