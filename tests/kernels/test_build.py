"""Libraries whose functions or structures are not what Python declares, compiled for the purpose."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


@pytest.mark.parametrize("is_whole_group", [True, False])
def test_worker_that_is_ended_while_it_compiles_leaves_no_compiler_running_and_its_folder_to_the_next(
    tmp_path: Path, is_whole_group: bool
) -> None:
    bin_dir, pid_file = tmp_path / "bin", tmp_path / "pid"
    bin_dir.mkdir()
    # It tells its version at once, and compiles for a minute by a program that it starts.
    (bin_dir / "g++").write_text(
        f'#!/bin/sh\ncase "$*" in -dump*) exit;; esac\nsleep 60 & echo $! > {pid_file}.new\n'
        f"mv {pid_file}.new {pid_file}\nwait\n"
    )
    (bin_dir / "g++").chmod(0o755)
    code = (
        "from kernels import build; from pathlib import Path; build.SOURCES = build.SOURCES[:1];"
        f"build.build_library(Path({str(tmp_path / 'cache')!r}))"
    )
    environ = {**os.environ, "PATH": f"{bin_dir}:/usr/bin:/bin"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, start_new_session=True) as worker:
        while not pid_file.exists():
            assert worker.poll() is None
            time.sleep(0.01)
        # As `headrace up` does it: the worker is asked to end, or its group is killed.
        if is_whole_group:
            os.killpg(worker.pid, signal.SIGKILL)
        else:
            worker.terminate()
    assert has_ended(int(pid_file.read_text()))
    assert len(list((tmp_path / "cache").glob("cpu-kernels-build-*"))) == 1
    build.tidy(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_build_removes_folders_of_killed_builds_and_none_in_which_is_built(tiny_sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    abandoned = cache / "cpu-kernels-build-abandoned"
    abandoned.mkdir(parents=True)
    (abandoned / "0.o").write_text("")
    with build.workplace(cache) as in_use:
        library = build_library(cache)
        assert sorted(cache.iterdir()) == sorted([in_use, library])


def test_start_that_builds_nothing_removes_folders_of_killed_builds(tiny_sources: Path, tmp_path: Path) -> None:
    library = build_library(tmp_path / "cache")
    (tmp_path / "cache" / "cpu-kernels-build-abandoned").mkdir()
    assert build_library(tmp_path / "cache") == library
    assert list((tmp_path / "cache").iterdir()) == [library]


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


def test_folder_is_locked_for_others_until_the_end(tmp_path: Path) -> None:
    with build.lock(tmp_path) as is_locked:
        assert is_locked
        with pytest.raises(BlockingIOError), build.lock(tmp_path):
            pass
    with build.lock(tmp_path) as is_locked:
        assert is_locked


def test_workplace_is_removed_in_the_end(tmp_path: Path) -> None:
    with build.workplace(tmp_path) as workplace:
        (workplace / "0.o").write_text("")
        build.tidy(tmp_path)
        assert (workplace / "0.o").exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_build_that_runs_is_left_alone_although_it_is_not_locked_yet(tmp_path: Path) -> None:
    (tmp_path / "cpu-kernels-build-new").mkdir()
    with build.lock(tmp_path):
        build.tidy(tmp_path)
    assert (tmp_path / "cpu-kernels-build-new").exists()
    build.tidy(tmp_path)
    assert not (tmp_path / "cpu-kernels-build-new").exists()


def test_nothing_is_removed_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "cpu-kernels-build-other").mkdir()
    build.tidy(tmp_path)
    build.remove_abandoned(tmp_path)
    assert (tmp_path / "cpu-kernels-build-other").exists()


def test_what_others_have_built_in_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "build-release").mkdir()
    build.tidy(tmp_path)
    assert (tmp_path / "build-release").exists()


def test_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu-kernels-build-theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    build.tidy(tmp_path)
    assert (tmp_path / "cpu-kernels-build-theirs").exists()


@pytest.mark.timeout(20)
def test_what_is_no_folder_is_neither_opened_nor_followed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "cpu-kernels-build-abandoned").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("")
    (cache / "cpu-kernels-build-link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(cache / "cpu-kernels-build-pipe")
    build.tidy(cache)
    assert (tmp_path / "elsewhere" / "kept").exists()
    assert sorted(path.name for path in cache.iterdir()) == ["cpu-kernels-build-link", "cpu-kernels-build-pipe"]


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
