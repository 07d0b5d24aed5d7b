"""The metadata of a GGUF file: parsing of every value type, typed access to the fields, and special tokens.

The file is untrusted: each field is checked for its type and range where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_worker.quantization.config_fields import CheckedFields
from gpu_worker.quantization.gguf.byte_reader import ByteReader, GGUFError

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
# The fewest bytes of an item: a string's length; the type of an array's items and their number.
_MIN_BYTES: Mapping[int, int] = {_STRING: 8, _ARRAY: 12}
# Real files have some dozens. An object costs us many times the bytes that a hostile file spends on it.
_MAX_FIELDS = 65_536
_MAX_ARRAYS = 65_536
_MAX_KEY_CHARACTERS = 65_535
_MAX_DEPTH = 4

NumberArray = npt.NDArray[Any]


class Metadata(CheckedFields):
    """The fields by key, with typed access. Arrays of numbers and booleans are numpy's, all others lists."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def error(self, name: str, problem: str) -> GGUFError:
        """Make the error that names a field."""
        return GGUFError(self._path, f"field {name!r}", problem)

    def texts(self, name: str) -> list[str]:
        """Read an array of strings."""
        value = self._present(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"is {self._shown(value)}; it must be an array of strings")
        return value

    def numbers(self, name: str, count: int) -> NumberArray:
        """Read an array of exactly this many finite numbers."""
        value = self._present(name, None)
        if not isinstance(value, np.ndarray) or value.shape != (count,) or not np.isfinite(value).all():
            raise self.error(name, f"is {self._shown(value)}; it must be an array of {count} finite numbers")
        return value

    def octets(self, name: str) -> bytes:
        """Read an array of bytes."""
        value = self._present(name, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.itemsize != 1:
            raise self.error(name, f"is {self._shown(value)}; it must be an array of bytes")
        return value.tobytes()

    def is_other_than(self, name: str, number: float) -> bool:
        """Return whether a field is there and holds anything but this number."""
        value = self._fields.get(name, number)
        return not isinstance(value, int | float) or value != number

    def _shown(self, value: Any) -> str:
        return f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else super()._shown(value)


def read_metadata(path: Path, reader: ByteReader, count: int) -> Metadata:
    """Read `count` fields; `GGUFError` if one is malformed or two have the same key."""
    if count > _MAX_FIELDS:
        raise reader.error("the number of metadata fields", f"is {count}; at most {_MAX_FIELDS} are read")
    values = _ValueReader(reader)
    fields: dict[str, Any] = {}
    for index in range(count):
        key = reader.text(f"the key of metadata field {index}")
        field = f"field {key[:80]!r}"
        if not 0 < len(key) <= _MAX_KEY_CHARACTERS:
            raise reader.error(field, f"has {len(key)} characters; keys have 1 to {_MAX_KEY_CHARACTERS}")
        if key in fields:
            raise reader.error(field, "occurs twice")
        fields[key] = values.read(reader.uint32(field), field)
    return Metadata(path, fields)


class _ValueReader:
    def __init__(self, reader: ByteReader) -> None:
        self._reader = reader
        self._num_arrays = 0

    def read(self, kind: int, field: str) -> Any:
        if kind == _STRING:
            return self._reader.text(field)
        if kind == _ARRAY:
            return self._array(field, depth=1)
        return self._numbers(kind, 1, field)[0].item()

    def _array(self, field: str, depth: int) -> Any:
        reader = self._reader
        self._num_arrays += 1
        if depth > _MAX_DEPTH or self._num_arrays > _MAX_ARRAYS:
            problem = f"has arrays more than {_MAX_DEPTH} deep, or more than {_MAX_ARRAYS} of them"
            raise reader.error(field, problem)
        kind, count = reader.uint32(field), reader.uint64(field)
        if kind not in (_STRING, _ARRAY):
            return self._numbers(kind, count, field)
        reader.check_count(count, _MIN_BYTES[kind], field)
        if kind == _STRING:
            return [reader.text(field) for _ in range(count)]
        return [self._array(field, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int, field: str) -> NumberArray:
        reader = self._reader
        if kind == _BOOL:
            values = np.frombuffer(reader.take(count, field), np.uint8)
            if values.size and values.max() > 1:
                raise reader.error(field, f"holds a boolean of value {values.max()}; it must be 0 or 1")
            return values.astype(np.bool_)
        if kind not in _NUMBERS:
            raise reader.error(field, f"has value type {kind}, which GGUF does not define")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(reader.take(count * dtype.itemsize, field), dtype)


TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
CONTROL = 3
"""The type of special tokens."""

_END_IDS = ("eos", "eot", "eom")
# Models end a turn with one token and a text with another, whereas most files name only one of the two as their end.
_ENDS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"),
        # Llama 4; Gemma 4, which waits for the results of tools; Solar Open; MiniMax M2.
        *("<|eot|>", "<|eom|>", "<turn|>", "<|tool_response>", "<|flush|>", "<|calls|>", "[e~["),
    }
)
# GLM ends a turn with the token that begins the next, of a user or of a tool.
_GLM_MARK, _GLM_ENDS = "[gMASK]", frozenset({"<|user|>", "<|observation|>"})
# gpt-oss ends each message of an answer with the token that ends Phi's turns, and the answer with others.
_PHI_ENDS, _HARMONY_ENDS = frozenset({"<|end|>"}), frozenset({"<|return|>", "<|call|>"})


def token_id(metadata: Metadata, name: str) -> int | None:
    """Return the id of the token with a role such as `bos`, or None; `GGUFError` if it is not a token's."""
    field = f"tokenizer.ggml.{name}_token_id"
    if field not in metadata:
        return None
    return metadata.integer(field, minimum=0, maximum=len(metadata.texts(TOKENS)) - 1)


def end_token_ids(metadata: Metadata) -> frozenset[int]:
    """Return the tokens that end a sequence: those that the file names, and special ones known by their spelling."""
    tokens = metadata.texts(TOKENS)
    named = {token_id(metadata, name) for name in _END_IDS} - {None}
    spelled: set[int] = set()
    if TOKEN_TYPES in metadata:
        types = metadata.numbers(TOKEN_TYPES, len(tokens))
        ends = _ENDS | (_HARMONY_ENDS if "<|return|>" in tokens else _PHI_ENDS)
        if _GLM_MARK in tokens:
            ends |= _GLM_ENDS
        spelled = {index for index, token in enumerate(tokens) if token in ends and types[index] == CONTROL}
    return frozenset(index for index in named | spelled if index is not None)
