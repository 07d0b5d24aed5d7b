"""The two files of an adapter (LoRA) as PEFT saves them: digest, size, and checks before they are read.

Files are those of strangers. The configuration and the header of the weights are bounded, and checked before the rest
is looked at. Workers judge what an adapter computes.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct

from shared.adapter_calls import Digest
from shared.errors import HeadraceError
from shared.files import open_regular

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
NAMES = (CONFIG_NAME, WEIGHTS_NAME)
MAX_ADAPTER_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 32 << 20
"""The header of 200,000 matrices, as many as the largest mixtures of experts have."""
MAX_TOLD_RANK = (1 << 20) - 1
"""Upper bound of the reported rank; workers check the ranks that they serve, which are far smaller."""
PIECE_BYTES = 4 << 20
_MAX_DIMENSIONS = 8
# Bytes of a number of each type that the format has in whole bytes.
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class AdapterFilesError(HeadraceError):
    """The named files are not an adapter that can be stored, or the stored object is not an adapter."""


class AdapterContent(Struct, frozen=True, array_like=True):
    """The digest and size of both files of an adapter, and its rank if the configuration says one, else 0."""

    digest: Digest
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_ADAPTER_BYTES)]
    rank: Annotated[int, Meta(ge=0, le=MAX_TOLD_RANK)] = 0


class Hash(Protocol):
    """A digest that bytes are added to."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""


def hash_start(digest: Hash, name: str, num_bytes: int) -> None:
    """Add a file's name and size to the digest of an adapter, before its bytes."""
    digest.update(f"{name}\0{num_bytes}\0".encode())


def content_digest(directory: Path) -> str:
    """Return the SHA-256 of an adapter's configuration and weights."""
    digest = hashlib.sha256()
    for name in NAMES:
        with open_regular(directory / name) as file:
            hash_start(digest, name, os.fstat(file.fileno()).st_size)
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def read_content(directory: Path) -> AdapterContent:
    """Read an adapter as PEFT saves it in a directory; `AdapterFilesError` if there is none, or it is too large.

    Configuration and header are checked first, since hashing gigabytes takes long.
    """
    try:
        sizes = [(directory / name).stat().st_size for name in NAMES]
        if sizes[0] > MAX_CONFIG_BYTES or sum(sizes) > MAX_ADAPTER_BYTES:
            limits = f"at most {MAX_CONFIG_BYTES} and {MAX_ADAPTER_BYTES} are served"
            raise AdapterFilesError(f"{CONFIG_NAME} has {sizes[0]} bytes, and with the weights {sum(sizes)}; {limits}")
        rank = _read_rank(directory / CONFIG_NAME)
        _check_weights(directory / WEIGHTS_NAME)
        digest = content_digest(directory)
    except OSError as error:
        raise AdapterFilesError(f"{error.filename} is missing or cannot be read ({error.strerror})") from None
    return AdapterContent(digest, sum(sizes), rank)


def _read_rank(path: Path) -> int:
    """Return the rank of a configuration, or 0; `AdapterFilesError` if it is not one of a LoRA."""
    with open_regular(path) as file:
        try:
            config: Any = msgspec.json.decode(file.read(MAX_CONFIG_BYTES))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AdapterFilesError(f"{CONFIG_NAME} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise AdapterFilesError(f"{CONFIG_NAME} has peft_type {str(kind)[:40]!r}; it must be 'LORA'")
    rank = config.get("r")
    return rank if type(rank) is int and 0 < rank <= MAX_TOLD_RANK else 0


class _Entry(Struct):
    """What the header says of a tensor; offsets count from the header's end."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, lt=2**48)]], Meta(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int | None:
        """Bytes that the shape needs; None for types without whole bytes."""
        size = _SIZES.get(self.dtype)
        return None if size is None else size * math.prod(self.shape)


def header_bytes(start: bytes, num_bytes: int) -> int:
    """Return the length of the header of weights that begin so; `AdapterFilesError` if it is too long."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > min(num_bytes - 8, MAX_HEADER_BYTES):
        limits = f"it may have {MAX_HEADER_BYTES}, and no more than the file"
        problem = f"header has {length} bytes in a file of {num_bytes}; {limits}"
        raise AdapterFilesError(f"{WEIGHTS_NAME} is not a whole safetensors file: its {problem}")
    return length


def _check_weights(path: Path) -> None:
    """Check that the header describes exactly the bytes that the file has."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        length = header_bytes(file.read(8), num_bytes)
        header = file.read(length)
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"its header cannot be read ({str(error)[:200]})"
        raise AdapterFilesError(f"{WEIGHTS_NAME} is not a whole safetensors file: {problem}") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, after = entry.data_offsets
        if start != end or entry.num_bytes not in (None, after - start):
            problem = f"its tensor {name[:120]!r} of shape {entry.shape} in {entry.dtype[:20]} cannot be at bytes"
            raise AdapterFilesError(f"{WEIGHTS_NAME} is not a whole safetensors file: {problem} {start} to {after}")
        end = after
    if end != (held := num_bytes - 8 - length):
        problem = f"its tensors have {end} bytes, and {held} stand behind the header; copy it again"
        raise AdapterFilesError(f"{WEIGHTS_NAME} is not a whole safetensors file: {problem}")
