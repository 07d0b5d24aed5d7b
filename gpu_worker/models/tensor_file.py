"""The safetensors files of a model directory: which tensors they hold, and where, and the names that tensors get.

The numbers themselves are read by `TensorReader`. The caller closes the files, by the `ExitStack` that it passes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.models.json_file import CheckpointError, JsonFile
from shared.files import open_regular

# What the library reads at most.
_MAX_HEADER_BYTES = 100_000_000
# With a long name; and what each tensor's fields have once, unless it is written with escapes.
_HEADER_BYTES_EACH = 160
_IN_EACH = b'"data_offsets"'
_MAX_REASON = 300
_LFS_POINTER = b"version https://git-lfs.github.com/"
# How the format names the types of numbers that torch has.
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is in its file; `dtype` stays a name if torch lacks the type."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Numbers that it has."""
        return math.prod(self.shape)


class TensorFile:
    """An open file. Close it, and read nothing afterwards; the position of `fd` is never moved."""

    def __init__(self, path: Path, max_tensors: int | None = None) -> None:
        """Open a file and read its header.

        Raises:
            CheckpointError: It is not a whole safetensors file, or has more than `max_tensors` tensors.
        """
        if not path.is_file():
            raise CheckpointError(
                path, f"is missing; weights are read from safetensors files only{_other_weights(path)}"
            )
        self.path = path
        try:
            if max_tensors is not None:
                _check_size(path, max_tensors)
            # The format's own library checks the header against the file: every byte belongs to exactly one tensor.
            with safe_open(path, framework="pt", device="cpu"):
                self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except (SafetensorError, OSError) as error:
            # It may quote a name of the file.
            reason = " ".join(str(error)[:_MAX_REASON].split())
            raise CheckpointError(path, f"is not a whole safetensors file ({reason}); {_remedy(path)}") from None
        try:
            self.tensors = _read_header(path, self.fd)
        except BaseException:
            self.close()
            raise

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Call the tensors by other names."""
        self.tensors = {new_name(name): tensor for name, tensor in self.tensors.items()}

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


def _other_weights(path: Path) -> str:
    """Say what can be done where a folder has weights in another form."""
    if (path.parent / "consolidated.safetensors").is_file():
        return "; consolidated.safetensors is Mistral's own form: take the same model in Hugging Face's format"
    if next(path.parent.glob("*.bin"), None) is not None:
        how = "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        return f"; {how} of transformers writes them from the .bin files here"
    return ""


def _remedy(path: Path) -> str:
    """Say how to get the whole file: a clone without Git LFS holds a few lines in its place."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        is_pointer = False
    return "it is a pointer of Git LFS: run `git lfs pull` in its folder" if is_pointer else "copy it again"


class _Entry(msgspec.Struct):
    """What the header says of a tensor; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(path: Path, fd: int) -> Mapping[str, StoredTensor]:
    """Read what the library has checked; a file that was replaced meanwhile fails here or when it is read."""
    try:
        length = min(int.from_bytes(os.pread(fd, 8, 0), "little"), _MAX_HEADER_BYTES)
        header = os.pread(fd, length, 8)
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
        if header.count(_IN_EACH) != len(entries) or b"\\u" in header:
            json.loads(header, object_pairs_hook=partial(_check_unique, path))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(path, f"changed while it was opened ({error}); load again when it is complete") from None
    return {name: _stored(entry, 8 + length) for name, entry in entries.items()}


def _check_unique(path: Path, pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object of the header that has a name twice: the library takes the last one, others the first."""
    counts = Counter(name for name, _ in pairs)
    if len(counts) < len(pairs):
        name = next(name for name, count in counts.items() if count > 1)
        raise CheckpointError(path, f"names {name[:120]!r} twice in its header; save it again")


def _check_size(path: Path, max_tensors: int) -> None:
    """Refuse a header of more tensors, before anything is made of it."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > os.fstat(file.fileno()).st_size:
            # The library reports it.
            return
        most = _HEADER_BYTES_EACH * max_tensors
        if length > most or file.read(length).count(_IN_EACH) > max_tensors:
            problem = f"has a header of {length} bytes; at most {most} bytes and {max_tensors} tensors are read"
            raise CheckpointError(path, problem)


def _stored(entry: _Entry, start: int) -> StoredTensor:
    begin, end = entry.data_offsets
    return StoredTensor(DTYPES.get(entry.dtype, entry.dtype), entry.shape, start + begin, end - begin)


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def stored_dtype(directory: Path) -> torch.dtype | None:
    """Return the type of most bytes of the first file's plain weights; None where no file can be read."""
    path = min(directory.glob("model*.safetensors"), default=None)
    if path is None:
        return None
    try:
        file = TensorFile(path)
    except CheckpointError:
        # The reader of the weights reports the error in the file.
        return None
    num_bytes: Counter[torch.dtype] = Counter()
    for tensor in file.tensors.values():
        if isinstance(tensor.dtype, torch.dtype) and tensor.dtype in _FLOATS:
            num_bytes[tensor.dtype] += tensor.num_bytes
    file.close()
    return max(num_bytes, key=num_bytes.__getitem__, default=None)


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
