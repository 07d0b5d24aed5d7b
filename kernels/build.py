"""Compiles the CPU kernels once per machine into a cache folder.

The result is a shared library with a plain C interface, so nothing of torch or Python is compiled in: a build takes
seconds, and one library serves every version of both. It is not linked against an OpenMP runtime, on purpose: its calls
bind to the runtime that torch has loaded already, so that torch and the kernels share one team of threads.

Owns no state but a lock on the cache folder, which ends with the process that builds. On a file system without locks no
process waits: each builds in a folder of its own. Runs compilers side by side as child processes.
"""

from __future__ import annotations

import fcntl
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
from pathlib import Path

from shared.errors import HeadraceError
from shared.files import TemporaryFolder

# Long enough for a machine whose processors are all busy: without the library a worker is many times slower.
BUILD_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.2


class KernelBuildError(HeadraceError):
    """The CPU kernels cannot be compiled here."""


def run_compilers(commands: Sequence[Sequence[str]], report: Callable[[int], None]) -> None:
    """Run commands side by side to their ends; when one fails, the others are killed.

    Raises:
        KernelBuildError: One fails, or takes too long.
        OSError: One cannot be started.
    """
    with ExitStack() as running:
        processes: list[subprocess.Popen[str]] = []
        for command in commands:
            process = running.enter_context(_start(command))
            running.callback(_kill, process)
            processes.append(process)
        for process in processes:
            _wait(process, lambda: report(sum(process.poll() is not None for process in processes)))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a compiler in a session of its own: what it starts is killed with it."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[str], while_waiting: Callable[[], None]) -> None:
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    while True:
        while_waiting()
        try:
            _, messages = process.communicate(timeout=POLL_INTERVAL_S)
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            _kill(process)
            process.communicate()
            raise KernelBuildError(f"the compiler did not finish within {BUILD_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise KernelBuildError(f"the compiler failed: {messages.strip()[-2000:]}")


logger = logging.getLogger(__name__)

SOURCE_ROOT = Path(__file__).parent
SOURCES, HEADERS = (
    tuple(str(path.relative_to(SOURCE_ROOT)) for path in sorted(SOURCE_ROOT.rglob(pattern)))
    for pattern in ("*.cpp", "*.h")
)
COMPILE_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions"),
    *("-fopenmp", "-fPIC", "-fvisibility=hidden"),
)
LINK_FLAGS = ("-shared", "-nodefaultlibs")
LIBRARIES = ("-lc", "-lm", "-lgcc")
# Of the folders in which libraries are compiled; unique, because other programs may build in the cache folder too.
_PREFIX = "cpu-kernels-build-"

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
        return library
    started = time.monotonic()
    logger.info("compiling the CPU kernels into %s (once)", directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _only_builder(directory, library, progress or _no_progress):
            if library.exists():
                return library
            with TemporaryFolder(_PREFIX, directory) as folder:
                _compile(compiler, Path(folder), library, progress or _no_progress)
    except OSError as error:
        raise KernelBuildError(f"{directory} cannot be used: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)
    return library


@contextmanager
def _only_builder(directory: Path, library: Path, progress: Progress) -> Iterator[None]:
    """Wait for a lock on the folder, and hold it, unless another process builds the library meanwhile."""
    deadline, handle = time.monotonic() + BUILD_TIMEOUT_S, os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while not library.exists() and time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(0, len(SOURCES))
                time.sleep(POLL_INTERVAL_S)
            except OSError:  # Some file systems have no locks.
                break
        yield
    finally:
        os.close(handle)


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
