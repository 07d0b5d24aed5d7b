"""Compares what Python declares of the compiled functions and structures with what the library says of itself.

Both sides are written by hand. Without the check, a field that one of them lacks would be read as another, silently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from kernels.cpu_structures import STRUCTURES
from shared.errors import HeadraceError

Function = tuple[type | None, Sequence[type]]
"""The type of a function's result, and those of its arguments."""

_LETTERS: Mapping[type | None, str] = {
    None: "v",
    ctypes.c_void_p: "p",
    ctypes.c_int32: "i",
    ctypes.c_int64: "l",
    ctypes.c_float: "f",
}


class AbiMismatchError(HeadraceError):
    """The compiled library does not take what Python would pass."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"the compiled CPU kernels do not fit the Python code: {name} {problem}")
        self.name = name


class _Field(ctypes.Structure):
    """`Field` of abi.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int32), ("size", ctypes.c_int32))


class _Description(ctypes.Structure):
    """`StructureDescription` of abi.h."""

    _fields_ = (("fields", ctypes.POINTER(_Field)), ("num_fields", ctypes.c_int32), ("size", ctypes.c_int32))


def check_abi(
    library: ctypes.CDLL,
    functions: Mapping[str, Function],
    structures: Mapping[str, type[ctypes.Structure]] = STRUCTURES,
) -> None:
    """Check every function and structure.

    Raises:
        AbiMismatchError: One is missing, or differs in its arguments, fields, offsets or sizes.
    """
    for name, (result, arguments) in functions.items():
        _check_function(library, name, result, arguments)
    for name, structure in structures.items():
        _check_structure(library, name, structure)


def _check_function(library: ctypes.CDLL, name: str, result: type | None, arguments: Sequence[type]) -> None:
    letters = _described(library, f"headrace_{name}_signature", name, "EXPORT_SIGNATURE", ctypes.c_char_p).decode()
    declared = "".join(_LETTERS[kind] for kind in (result, *arguments))
    if letters != declared:
        kinds = "a letter each: v nothing, p pointer, i int32, l int64, f float"
        problem = f"has result and arguments {letters} in C++ and {declared} in Python ({kinds})"
        raise AbiMismatchError(name, problem)


def _check_structure(library: ctypes.CDLL, name: str, structure: type[ctypes.Structure]) -> None:
    pointer = ctypes.POINTER(_Description)
    described = _described(library, f"headrace_structure_{name}", name, "EXPORT_STRUCTURE", pointer).contents
    fields = described.fields[: described.num_fields]
    theirs = {field.name.decode(): (field.offset, field.size) for field in fields}
    names = [field[0] for field in structure._fields_]
    ours = {field: (getattr(structure, field).offset, getattr(structure, field).size) for field in names}
    for field in dict.fromkeys((*ours, *theirs)):
        if ours.get(field) != theirs.get(field):
            sides = f"{_shown(theirs.get(field))} in C++ and {_shown(ours.get(field))} in Python"
            raise AbiMismatchError(name, f"has the field {field!r} {sides}")
    if described.size != ctypes.sizeof(structure):
        raise AbiMismatchError(name, f"has {described.size} bytes in C++ and {ctypes.sizeof(structure)} in Python")


def _shown(place: tuple[int, int] | None) -> str:
    return "nowhere" if place is None else f"at byte {place[0]} with {place[1]} bytes"


def _described(library: ctypes.CDLL, symbol: str, name: str, macro: str, kind: type) -> Any:
    try:
        describe = getattr(library, symbol)
    except AttributeError:
        raise AbiMismatchError(name, f"is not described; its C++ source lacks {macro}({name})") from None
    describe.restype = kind
    return describe()
