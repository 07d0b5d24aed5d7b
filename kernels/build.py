"""Compiles the CPU kernels once per machine into a cache folder.

The result is a shared library with a plain C interface, so nothing of torch or Python is compiled in: a build takes
seconds, and one library serves every version of both. It is deliberately not linked against an OpenMP runtime: its
calls bind to the one torch has already loaded, so that torch and the kernels share one team of threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kernels import build_folder
from shared.errors import HeadraceError

logger = logging.getLogger(__name__)

SOURCE_ROOT = Path(__file__).parent
SOURCES = (
    "decoder_stack/cpu.cpp",
    "paged_attention/cpu.cpp",
    "linear/dense/cpu.cpp",
    "linear/dense/heads.cpp",
    "linear/cpu/cpu.cpp",
    "rope_kv_write/cpu.cpp",
    "rms_norm/cpu.cpp",
    "silu_mul/cpu.cpp",
    "activation/cpu.cpp",
    "moe/cpu.cpp",
    "sampling/cpu.cpp",
    "logits_bitmask/cpu.cpp",
    "causal_conv/cpu.cpp",
    "gated_delta/cpu.cpp",
    "ssd/cpu.cpp",
)
HEADERS = (
    "abi.h",
    "decoder_stack/stack.h",
    "decoder_stack/chain.h",
    "panel.h",
    "simd.h",
    "matrix_state/columns.h",
    "state_rows.h",
    "team.h",
    "quantized_kv.h",
    "cache_strides.h",
    "linear/dense/packed.h",
    "linear/dense/widened.h",
    "linear/cpu/numbers.h",
    "linear/cpu/weight.h",
    "linear/cpu/rows.h",
    "linear/cpu/integers.h",
    "linear/cpu/floats.h",
    "linear/cpu/pairs.h",
    "linear/cpu/multiply.h",
    "linear/matrix.h",
    "paged_attention/attention.h",
    "paged_attention/query_rows.h",
    "paged_attention/span.h",
    "rms_norm/rows.h",
    "silu_mul/rows.h",
    "activation/functions.h",
    "moe/routing.h",
    "moe/mixture.h",
    "moe/block.h",
    "rope_kv_write/token.h",
    "sampling/philox.h",
    "sampling/row.h",
    "sampling/threshold.h",
    "sampling/penalties.h",
    "sampling/scores.h",
)
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
)
LINK_FLAGS = ("-shared", "-nodefaultlibs")
LIBRARIES = ("-lc", "-lm", "-lgcc")
# Long enough for a machine whose processors are all taken: without the library a worker is many times slower.
BUILD_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.2
# Runs a compiler in a session of its own, and ends that session when nobody holds the other end of the pipe any more
# that is the standard input: whichever signal has ended the worker, and however few processes it has reached.
_GUARDED = """
exec 3<&0
{ read -r _ <&3; kill -KILL 0; } </dev/null >/dev/null 2>&1 &
"$@" </dev/null 3<&-
status=$?
kill -KILL $!
exit $status
"""

Progress = Callable[[int, int], None]


class KernelBuildError(HeadraceError):
    """The CPU kernels cannot be compiled here."""

    def __init__(self, problem: str) -> None:
        """Say what is missing or failed."""
        super().__init__(problem)


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder for compiled kernels: `HEADRACE_CACHE_DIR`, else `headrace` in the user's cache folder."""
    if configured := environ.get("HEADRACE_CACHE_DIR"):
        return Path(configured)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def build_library(directory: Path, progress: Progress | None = None) -> Path:
    """Return the compiled library, building it unless this source, compiler and processor were built before.

    Of several processes that need it, one builds and the others wait for it. Where the folder cannot be locked, each
    builds in a folder of its own and moves the result into place.

    Args:
        directory: Where the library is, or will be.
        progress: Called several times a second while it is built, with the files that are compiled and that there are.

    Raises:
        KernelBuildError: There is no g++, or it fails, or the folder cannot be written.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise KernelBuildError("there is no g++ on the PATH")
    library = directory / f"cpu-kernels-{_fingerprint(compiler)}.so"
    if library.exists():
        build_folder.tidy(directory)
        return library
    started = time.monotonic()
    logger.info("compiling the CPU kernels into %s (once)", directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _only_builder(directory, library, progress or _no_progress):
            if library.exists():
                return library
            with build_folder.workplace(directory) as workplace:
                _compile(compiler, workplace, library, progress or _no_progress)
    except OSError as error:
        raise KernelBuildError(f"{directory} cannot be used: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)
    return library


@contextmanager
def _only_builder(directory: Path, library: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock on the folder; go on without it once the library is there, or nobody can have built for so long.

    Who gets the lock removes what killed builds have left.
    """
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with ExitStack() as held:
        while not library.exists() and time.monotonic() < deadline:
            try:
                if held.enter_context(build_folder.lock(directory)):
                    build_folder.remove_abandoned(directory)
                break
            except BlockingIOError:
                progress(0, len(SOURCES))
                time.sleep(_LOOK_EVERY_S)
        yield


def _no_progress(_done: int, _total: int) -> None:
    pass


def _compile(compiler: str, workplace: Path, library: Path, progress: Progress) -> None:
    """Compile the sources side by side, link them, and move the library into place."""
    objects = [workplace / f"{index}.o" for index in range(len(SOURCES))]
    linked = workplace / "linked.so"
    with _lifeline() as lifeline, ExitStack() as compilers:
        processes = []
        for source, target in zip(SOURCES, objects, strict=True):
            command = [compiler, *COMPILE_FLAGS, "-c", str(SOURCE_ROOT / source), "-o", str(target)]
            process = compilers.enter_context(_start(command, lifeline))
            # When one fails, the others are not waited for.
            compilers.callback(_end, process)
            processes.append(process)
        for process in processes:
            _finish(process, partial(_report, processes, progress))
        command = [compiler, *LINK_FLAGS, *map(str, objects), "-o", str(linked), *LIBRARIES]
        _finish(_start(command, lifeline), lambda: None)
    linked.replace(library)
    progress(len(SOURCES), len(SOURCES))


def _report(processes: Sequence[subprocess.Popen[str]], progress: Progress) -> None:
    """Report how many compilers have ended; the whole is done only when the library is linked."""
    progress(min(sum(process.poll() is not None for process in processes), len(processes) - 1), len(processes))


@contextmanager
def _lifeline() -> Iterator[int]:
    """Open a pipe whose other end this process alone holds, and return the end that compilers watch."""
    watched, held = os.pipe()
    try:
        yield watched
    finally:
        os.close(watched)
        os.close(held)


def _start(command: list[str], lifeline: int) -> subprocess.Popen[str]:
    """Start a compiler with a group of its own: what it starts ends with it, and all of it with this process."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARDED, "sh", *command],
        stdin=lifeline,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a compiler that runs, and the programs that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _finish(process: subprocess.Popen[str], waiting: Callable[[], None]) -> None:
    """Wait for the end of a compiler, calling `waiting` meanwhile."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    while True:
        waiting()
        try:
            _, messages = process.communicate(timeout=_LOOK_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            _end(process)
            process.communicate()
            raise KernelBuildError(f"the compiler did not finish within {BUILD_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise KernelBuildError(f"the compiler failed: {messages.strip()[-2000:]}")


def _fingerprint(compiler: str) -> str:
    """Hash everything the machine code depends on."""
    version = subprocess.run(
        [compiler, "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, check=False, timeout=10
    )
    parts = [version.stdout, _processor(), *COMPILE_FLAGS, *LINK_FLAGS, *LIBRARIES]
    parts += [(SOURCE_ROOT / name).read_text() for name in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Name the processor's model and instruction sets, on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in wanted))


def kernels_allowed(environ: Mapping[str, str]) -> bool:
    """Return False where `HEADRACE_CPU_KERNELS=off` asks for plain torch."""
    return environ.get("HEADRACE_CPU_KERNELS", "").lower() not in ("off", "0", "false", "no")
