"""Compiles the CPU kernels once per machine into a cache folder.

The result is a shared library with a plain C interface, so nothing of torch or Python is compiled in: a build takes
seconds, and one library serves every version of both. It is not linked against an OpenMP runtime, on purpose: its calls
bind to the runtime that torch has loaded already, so that torch and the kernels share one team of threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kernels import build_folder
from kernels.compilers import BUILD_TIMEOUT_S, POLL_INTERVAL_S, KernelBuildError, run_compilers

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
    "activation/cpu.cpp",
    "moe/cpu.cpp",
    "sampling/cpu.cpp",
    "logits_bitmask/cpu.cpp",
    "causal_conv/cpu.cpp",
    "gated_delta/cpu.cpp",
    "ssd/cpu.cpp",
    "collectives/cpu.cpp",
    "low_rank/cpu.cpp",
)
HEADERS = (
    "abi.h",
    "decoder_stack/stack.h",
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
    "low_rank/product.h",
    "paged_attention/attention.h",
    "paged_attention/query_rows.h",
    "paged_attention/span.h",
    "rms_norm/rows.h",
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

Progress = Callable[[int, int], None]


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder for compiled kernels: `HEADRACE_CACHE_DIR`, else `headrace` in the user's cache folder."""
    if configured := environ.get("HEADRACE_CACHE_DIR"):
        return Path(configured)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def build_library(directory: Path, progress: Progress | None = None) -> Path:
    """Return the compiled library, building it unless this source, compiler and processor were built before.

    Of several processes that need it, one builds and the others wait for it. Where the folder cannot be locked, each
    builds in a folder of its own and moves the result into place.

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
    """Wait for a lock on the folder, and hold it; who gets it removes what killed builds have left."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with ExitStack() as held:
        while not library.exists() and time.monotonic() < deadline:
            try:
                if held.enter_context(build_folder.lock(directory)):
                    build_folder.remove_abandoned(directory)
                break
            except BlockingIOError:
                progress(0, len(SOURCES))
                time.sleep(POLL_INTERVAL_S)
        yield


def _no_progress(_done: int, _total: int) -> None:
    pass


def _compile(compiler: str, workplace: Path, library: Path, progress: Progress) -> None:
    objects = [workplace / f"{index}.o" for index in range(len(SOURCES))]
    linked = workplace / "linked.so"
    commands = [
        [compiler, *COMPILE_FLAGS, "-c", str(SOURCE_ROOT / source), "-o", str(target)]
        for source, target in zip(SOURCES, objects, strict=True)
    ]

    def report(num_ended: int) -> None:
        # The last one counts only when the library is linked.
        progress(min(num_ended, len(SOURCES) - 1), len(SOURCES))

    run_compilers(commands, report)
    run_compilers([[compiler, *LINK_FLAGS, *map(str, objects), "-o", str(linked), *LIBRARIES]], lambda _: None)
    linked.replace(library)
    progress(len(SOURCES), len(SOURCES))


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, check=False, timeout=10
    )
    parts = [version.stdout, _processor(), *COMPILE_FLAGS, *LINK_FLAGS, *LIBRARIES]
    parts += [(SOURCE_ROOT / name).read_text() for name in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in wanted))


def can_build() -> bool:
    """Whether kernels are wanted here and there is a compiler: so they will be there, unless it fails."""
    return kernels_allowed(os.environ) and shutil.which("g++") is not None


def kernels_allowed(environ: Mapping[str, str]) -> bool:
    """Return False where `HEADRACE_CPU_KERNELS=off` asks for plain torch."""
    return environ.get("HEADRACE_CPU_KERNELS", "").lower() not in ("off", "0", "false", "no")
