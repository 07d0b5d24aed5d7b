"""One safetensors file: which tensors it holds, and where. The numbers themselves are read by `TensorReader`."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.models.errors import CheckpointError

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

    def __init__(self, path: Path) -> None:
        """Open a file and read its header; `CheckpointError` if it is not a whole safetensors file."""
        if not path.is_file():
            raise CheckpointError(
                path, f"is missing; weights are read from safetensors files only{_other_weights(path)}"
            )
        self.path = path
        try:
            # The format's own library checks the header against the file: every byte belongs to exactly one tensor.
            with safe_open(path, framework="pt", device="cpu"):
                self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(path, f"is not a whole safetensors file ({error}); {_remedy(path)}") from None
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
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        fields = msgspec.json.decode(os.pread(fd, length, 8), type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items() if name != "__metadata__"
        }
    except (OSError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointError(path, f"changed while it was opened ({error}); load again when it is complete") from None
    return {name: _stored(entry, 8 + length) for name, entry in entries.items()}


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
        # Whoever reads the weights says what is wrong with the file.
        return None
    num_bytes: Counter[torch.dtype] = Counter()
    for tensor in file.tensors.values():
        if isinstance(tensor.dtype, torch.dtype) and tensor.dtype in _FLOATS:
            num_bytes[tensor.dtype] += tensor.num_bytes
    file.close()
    return max(num_bytes, key=num_bytes.__getitem__, default=None)
