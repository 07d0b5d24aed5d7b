"""Libraries whose functions or structures are not what Python declares, compiled for the purpose."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from kernels import build
from kernels.build import SOURCE_ROOT, KernelBuildError, build_library, cache_dir, can_build
from kernels.cpu_library import AbiMismatchError, check_abi, cpu_library, load_library
from kernels.cpu_structures import STRUCTURES

TINY_SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the kernels by one tiny function, so that a build takes a moment only."""
    root = tmp_path / "sources"
    root.mkdir()
    (root / "tiny.cpp").write_text(TINY_SOURCE)
    monkeypatch.setattr(build, "SOURCE_ROOT", root)
    monkeypatch.setattr(build, "SOURCES", ("tiny.cpp",))
    monkeypatch.setattr(build, "HEADERS", ())
    return root


def test_build_reports_its_progress_and_a_second_one_none(tiny_sources: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_library(tmp_path / "cache", lambda *counts: seen.append(counts))
    assert (seen[0], seen[-1]) == ((0, 1), (1, 1))
    told = len(seen)
    build_library(tmp_path / "cache", lambda *counts: seen.append(counts))
    assert len(seen) == told


def test_second_build_uses_the_first(tiny_sources: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache")
    built = first.stat().st_mtime_ns
    assert build_library(tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == built


def test_changed_source_is_built_again(tiny_sources: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache")
    (tiny_sources / "tiny.cpp").write_text(TINY_SOURCE.replace("42", "43"))
    assert build_library(tmp_path / "cache") != first


def test_concurrent_builds_leave_one_whole_library(tiny_sources: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(build_library, [tmp_path / "cache"] * 4))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [path.name for path in results]


def test_one_of_several_builds_and_the_others_wait(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []
    compile_really = build._compile

    def compile_slowly(compiler: str, workplace: Path, library: Path, progress: build.Progress) -> None:
        compiled.append(workplace)
        time.sleep(0.5)
        compile_really(compiler, workplace, library, progress)

    monkeypatch.setattr(build, "_compile", compile_slowly)
    waited: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(build_library, [tmp_path / "cache"] * 3, [lambda *counts: waited.append(counts)] * 3))
    assert len(compiled) == 1
    assert (0, 1) in waited


def test_broken_source_raises_with_the_compilers_words(tiny_sources: Path, tmp_path: Path) -> None:
    (tiny_sources / "tiny.cpp").write_text("int answer( {")
    with pytest.raises(KernelBuildError, match="error"):
        build_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_build_that_fails_leaves_no_compiler_running(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    # The first source is refused as soon as the second is compiled, for a minute, by a program that g++ starts.
    pid = tmp_path / "pid"
    slow = f"sleep 60 & echo $! > {pid}.new; mv {pid}.new {pid}; wait"
    broken = f"while ! [ -e {pid} ]; do sleep 0.05; done; exit 1"
    (bin_dir / "g++").write_text(f'#!/bin/sh\ncase "$*" in *slow*) {slow};; *broken*) {broken};; esac\n')
    (bin_dir / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    for name in ("broken.cpp", "slow.cpp"):
        (tiny_sources / name).write_text(TINY_SOURCE)
    monkeypatch.setattr(build, "SOURCES", ("broken.cpp", "slow.cpp"))
    with pytest.raises(KernelBuildError):
        build_library(tmp_path / "cache")
    assert has_ended(int(pid.read_text()))


def has_ended(pid: int) -> bool:
    """Return whether a process ends long before its minute is over; whose child it was may not have asked how."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_build_removes_what_a_killed_one_has_left(tiny_sources: Path, tmp_path: Path) -> None:
    abandoned = tmp_path / "cpu-kernels-build-abandoned"
    abandoned.mkdir()
    (abandoned / "0.o").write_text("")
    (tmp_path / "build-release").mkdir()
    os.utime(abandoned, (time.time() - 3600.0,) * 2)
    library = build_library(tmp_path)
    assert {library, tmp_path / "build-release"} == {path for path in tmp_path.iterdir() if path != tiny_sources}


def test_each_builds_where_there_are_no_locks(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks here")))
    assert build_library(tmp_path / "cache").exists()


def test_missing_compiler_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("g++") is None
    assert not can_build()
    with pytest.raises(KernelBuildError, match=r"g\+\+"):
        build_library(tmp_path)


def test_unwritable_cache_raises(tiny_sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelBuildError, match="cannot be used"):
        build_library(tmp_path / "file" / "cache")


def test_foreign_library_is_refused(tiny_sources: Path, tmp_path: Path) -> None:
    with pytest.raises(AbiMismatchError, match="paged_attention is not described"):
        load_library(build_library(tmp_path / "cache"))


def test_cache_dir_prefers_the_setting() -> None:
    assert cache_dir({"HEADRACE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/headrace")
    assert cache_dir({}) == Path.home() / ".cache" / "headrace"


def test_kernels_switched_off_returns_none_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", "off")
    with caplog.at_level(logging.INFO):
        assert cpu_library.__wrapped__() is None
    assert "plain torch" in caplog.text


def test_missing_compiler_falls_back_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpu_library.__wrapped__() is None
    assert "slower" in caplog.text
    assert "g++" in caplog.text


def test_library_shares_torchs_threads() -> None:
    """One OpenMP runtime in the process, and it is torch's."""
    code = (
        "import torch; from kernels.cpu_library import cpu_library; assert cpu_library();"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split('/')[-1]})"
    )
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert maps.count("libgomp") == 1
    assert "torch" in maps


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
