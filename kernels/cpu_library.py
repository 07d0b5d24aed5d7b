"""The compiled CPU kernels as callable C functions, or None where they cannot be had.

The library is loaded at the first use and kept for the life of the process. What Python declares of its functions and
structures is compared with what the library says of itself: both sides are written by hand, and a field that one of
them lacks would be read as another, silently.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from kernels.build import KernelBuildError, Progress, build_library, cache_dir, kernels_allowed
from kernels.cpu_structures import STRUCTURES
from shared.errors import HeadraceError

Function = tuple[type | None, Sequence[type]]
"""The type of a function's result, and those of its arguments."""

_LETTERS: Mapping[type | None, str] = {
    None: "v", ctypes.c_void_p: "p", ctypes.c_int32: "i", ctypes.c_int64: "l", ctypes.c_float: "f",
}  # fmt: skip


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


logger = logging.getLogger(__name__)

# The numbers of `DType` in simd.h.
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_DTYPE_NUMBERS = {**DTYPE_NUMBERS, torch.int8: 3, torch.float8_e4m3fn: 4}

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

# For each function its result and its arguments.
_SIGNATURES: Mapping[str, tuple[type | None, list[type]]] = MappingProxyType(
    {
        "paged_attention": (None, [_POINTER, *[_INT32] * 3]),
        "rms_norm": (None, [*[_POINTER] * 4, _INT64, _FLOAT, *[_INT32] * 4]),
        "silu_mul": (None, [*[_POINTER] * 2, *[_INT32] * 4]),
        "activation": (None, [*[_POINTER] * 3, *[_INT64] * 2, *[_INT32] * 5]),
        "rope_kv_write": (None, [_POINTER, *[_INT32] * 3]),
        "linear": (None, [*[_POINTER] * 4, _INT64, *[_INT32] * 7]),
        "head_linear": (None, [*[_POINTER] * 3, *[_INT64] * 4, *[_INT32] * 7]),
        "panel_width": (_INT32, []),
        "quantized_linear": (None, [*[_POINTER] * 3, _INT64, *[_INT32] * 3, _POINTER, _INT32]),
        "quantized_linear_scratch": (_INT64, [_POINTER, _INT32, _INT64]),
        "decoder_stack": (_INT32, [*[_POINTER] * 4, _INT32]),
        "decoder_stack_scratch": (_INT64, [_POINTER, _INT64]),
        "route": (None, [*[_POINTER] * 4, *[_INT32] * 2]),
        "experts": (None, [*[_POINTER] * 5, _INT64, *[_INT32] * 3, *[_POINTER] * 2, _INT32]),
        "experts_scratch": (_INT64, [_POINTER, *[_INT32] * 3]),
        "sample_tokens": (None, [*[_POINTER] * 10, _INT64, *[_INT32] * 4]),
        "part_highest": (None, [*[_POINTER] * 3, _INT64, *[_INT32] * 3]),
        "part_masses": (None, [*[_POINTER] * 5, _INT64, *[_INT32] * 3]),
        "part_draw": (None, [*[_POINTER] * 6, _INT64, *[_INT32] * 3]),
        "penalise": (None, [*[_POINTER] * 8, _INT64, *[_INT32] * 3]),
        "count_tokens": (None, [*[_POINTER] * 4, *[_INT32] * 2]),
        "score_tokens": (None, [*[_POINTER] * 5, _INT64, *[_INT32] * 4]),
        "forbid_tokens": (None, [*[_POINTER] * 3, _INT64, *[_INT32] * 2]),
        "causal_conv": (None, [*[_POINTER] * 6, _INT64, *[_INT32] * 5]),
        "gated_delta": (None, [*[_POINTER] * 7, *[_INT64] * 2, *[_INT32] * 6]),
        "ssd": (None, [*[_POINTER] * 8, *[_INT64] * 2, *[_INT32] * 4, *[_FLOAT] * 2, *[_INT32] * 2]),
        "low_rank": (None, [*[_POINTER] * 4, *[_INT64] * 2, *[_INT32] * 4]),
        "exchange_sum": (_INT32, [*[_POINTER] * 4, *[_INT64] * 2, *[_INT32] * 3]),
        "exchange_gather": (_INT32, [*[_POINTER] * 5, *[_INT64] * 3, *[_INT32] * 2]),
    },
)


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The C functions. Their arguments are those of the `extern "C"` functions of the same names."""

    paged_attention: Callable[..., None]
    rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    activation: Callable[..., None]
    rope_kv_write: Callable[..., None]
    linear: Callable[..., None]
    head_linear: Callable[..., None]
    panel_width: Callable[[], int]
    quantized_linear: Callable[..., None]
    quantized_linear_scratch: Callable[..., int]
    decoder_stack: Callable[..., int]
    decoder_stack_scratch: Callable[..., int]
    route: Callable[..., None]
    experts: Callable[..., None]
    experts_scratch: Callable[..., int]
    sample_tokens: Callable[..., None]
    part_highest: Callable[..., None]
    part_masses: Callable[..., None]
    part_draw: Callable[..., None]
    penalise: Callable[..., None]
    count_tokens: Callable[..., None]
    score_tokens: Callable[..., None]
    forbid_tokens: Callable[..., None]
    causal_conv: Callable[..., None]
    gated_delta: Callable[..., None]
    ssd: Callable[..., None]
    low_rank: Callable[..., None]
    exchange_sum: Callable[..., int]
    exchange_gather: Callable[..., int]


def compile_cpu_library(progress: Progress) -> None:
    """Compile the kernels where that is allowed and was not done before; `cpu_library` raises if it failed."""
    if kernels_allowed(os.environ):
        with contextlib.suppress(KernelBuildError):
            build_library(cache_dir(os.environ), progress)


@functools.cache
def cpu_library() -> CpuLibrary | None:
    """Return the compiled kernels, building them at the first call; None means: use plain torch."""
    if not kernels_allowed(os.environ):
        logger.info("CPU kernels are off (HEADRACE_CPU_KERNELS); attention runs in plain torch, several times slower")
        return None
    try:
        return load_library(build_library(cache_dir(os.environ)))
    except (KernelBuildError, OSError) as error:
        logger.warning("no CPU kernels (%s); attention runs in plain torch, several times slower: install g++", error)
        return None


def load_library(path: Path) -> CpuLibrary:
    """Load a compiled library.

    Raises:
        OSError: It does not fit this process, for example because torch brought no OpenMP runtime.
        AbiMismatchError: Its functions or structures are others than those that are declared here.
    """
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    check_abi(library, _SIGNATURES)
    return CpuLibrary(**{name: _function(library, name, *signature) for name, signature in _SIGNATURES.items()})


def _function(library: ctypes.CDLL, name: str, result: type | None, arguments: list[type]) -> Callable[..., Any]:
    function = getattr(library, f"headrace_{name}")
    function.restype = result
    function.argtypes = arguments
    return cast("Callable[..., Any]", function)
