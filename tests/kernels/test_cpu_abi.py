"""Libraries whose functions or structures are not what Python declares, compiled for the purpose."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from kernels.build import SOURCE_ROOT, build_library, cache_dir
from kernels.cpu_library import AbiMismatchError, check_abi
from kernels.cpu_structures import STRUCTURES

SOURCE = """
#include "abi.h"
namespace headrace {
struct Part { float* weight; int32_t count; };
struct Whole { void* data; Part parts[2]; int64_t stride; float scale; FIELDS };
}
EXPORTED int32_t headrace_run(const headrace::Whole* whole, int64_t rows, float scale) { return rows > scale; }
EXPORT_SIGNATURE(run)
EXPORT_STRUCTURE(Part, FIELD(weight), FIELD(count))
EXPORT_STRUCTURE(Whole, FIELD(data), FIELD(parts), FIELD(stride), FIELD(scale) NAMES)
"""
RUN = {"run": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float])}


class Part(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("count", ctypes.c_int32))


WHOLE = [("data", ctypes.c_void_p), ("parts", Part * 2), ("stride", ctypes.c_int64), ("scale", ctypes.c_float)]


def structures(*fields: tuple[str, type]) -> dict[str, type[ctypes.Structure]]:
    return {"Part": Part, "Whole": type("Whole", (ctypes.Structure,), {"_fields_": list(fields)})}


def compiled(folder: Path, fields: str = "", names: str = "") -> ctypes.CDLL:
    source, library = folder / "tiny.cpp", folder / "tiny.so"
    source.write_text(SOURCE.replace("FIELDS", fields).replace("NAMES", names))
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-I", SOURCE_ROOT, source, "-o", library]
    subprocess.run(command, check=True, timeout=100)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("tiny"))


def test_equal_declarations_pass(tiny: ctypes.CDLL) -> None:
    check_abi(tiny, RUN, structures(*WHOLE))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (WHOLE[:3], "Whole has the field 'scale' at byte 48 with 4 bytes in C.. and nowhere in Python"),
        ([WHOLE[0], WHOLE[2], WHOLE[1], WHOLE[3]], "Whole has the field 'stride' at byte 40 .* and at byte 8 with 8"),
        ([*WHOLE[:3], ("scale", ctypes.c_double)], "Whole has the field 'scale' at byte 48 with 4 .* with 8 bytes"),
        ([*WHOLE[:3], ("factor", ctypes.c_float)], "Whole has the field 'factor' nowhere in C.. and at byte 48"),
        ([("data", ctypes.c_void_p), ("parts", Part * 3), *WHOLE[2:]], "Whole has the field 'parts' at byte 8 with 32"),
        ([*WHOLE, ("more", ctypes.c_int32)], "Whole has the field 'more' nowhere in C.."),
    ],
)
def test_changed_structure_in_python_is_refused(
    tiny: ctypes.CDLL, fields: list[tuple[str, type]], message: str
) -> None:
    with pytest.raises(AbiMismatchError, match=message) as caught:
        check_abi(tiny, RUN, structures(*fields))
    assert caught.value.name == "Whole"


def test_field_that_cpp_adds_is_refused_whether_it_is_listed_or_not(tmp_path: Path) -> None:
    for number, (names, message) in enumerate(
        [(", FIELD(extra)", "'extra' at byte 56 .* nowhere in Python"), ("", "has 64 bytes in C.. and 56 in Python")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        library = compiled(folder, "double extra;", names)
        with pytest.raises(AbiMismatchError, match=message):
            check_abi(library, RUN, structures(*WHOLE))


@pytest.mark.parametrize(
    "declared",
    [
        (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int64]),
        (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_float]),
        (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float]),
        (None, [ctypes.c_void_p, ctypes.c_float, ctypes.c_int64]),
    ],
)
def test_changed_signature_is_refused(tiny: ctypes.CDLL, declared: tuple[type | None, list[type]]) -> None:
    with pytest.raises(AbiMismatchError, match=r"run has result and arguments iplf in C\+\+ and"):
        check_abi(tiny, {"run": declared}, {})


def test_what_a_library_does_not_describe_is_refused(tiny: ctypes.CDLL) -> None:
    with pytest.raises(AbiMismatchError, match=r"stop is not described; its C\+\+ source lacks EXPORT_SIGNATURE"):
        check_abi(tiny, {"stop": (None, [])}, {})
    with pytest.raises(AbiMismatchError, match=r"Other is not described; .* lacks EXPORT_STRUCTURE\(Other\)"):
        check_abi(tiny, {}, {"Other": Part})


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_of_the_kernels_is_compared(name: str) -> None:
    library = ctypes.CDLL(str(build_library(cache_dir(os.environ))))
    check_abi(library, {}, {name: STRUCTURES[name]})
    shorter = type(name, (ctypes.Structure,), {"_fields_": STRUCTURES[name]._fields_[1:]})
    with pytest.raises(AbiMismatchError, match=f"{name} has the field"):
        check_abi(library, {}, {name: shorter})
