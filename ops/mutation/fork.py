"""Runs pytest and mypy in forks of this process, which has imported the libraries, so that a run starts at once.

A fork forgets the project's modules and imports them from the copy of the tree. So every module there sees the mutant,
those that take names from it too, and so do the processes that tests start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import psutil

from ops.mutation.sample import PACKAGES

# What takes long to import and keeps no state of a run.
_LIBRARIES = (
    *("torch", "numpy", "safetensors.torch", "tokenizers", "triton", "transformers", "llguidance", "gguf"),
    *("msgspec", "nats", "redis.asyncio", "uvloop", "httptools", "starlette.applications", "prometheus_client"),
    *("openai", "httpx2", "jsonschema", "jinja2", "click", "yaml", "PIL.Image"),
    *("pytest", "pytest_asyncio.plugin", "pytest_timeout", "hypothesis.stateful", "mypy.api"),
)


def prepare() -> None:
    """Import the libraries."""
    # Read by torch and Triton when they are imported.
    os.environ |= {"OMP_WAIT_POLICY": "passive"}
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ["TRITON_INTERPRET"] = "1"
    for library in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    gc.freeze()


@contextlib.contextmanager
def changed_file(path: Path, text: str) -> Iterator[None]:
    """Let a file have another text while the block runs; then its bytecode, which names its time, is valid again."""
    original, status = path.read_text(), path.stat()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(original)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def run_forked(copy: Path, action: Callable[[], int], seconds: float) -> tuple[int, str] | None:
    """Run an action in the copy; return its exit status and what it printed, None if it took too long."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = multiprocessing.get_context("fork").Process(target=_run, args=(copy, action, output))
        process.start()
        process.join(seconds)
        status = process.exitcode
        assert process.pid is not None
        if status is None:
            kill_with_descendants(process.pid)
            process.join()
        # Servers of tests that did not get to their end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return None if status is None else (status, output.read())


def _run(copy: Path, action: Callable[[], int], output: TextIO) -> None:
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    sys.dont_write_bytecode = True
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", *PACKAGES):
            del sys.modules[name]
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = output
    status = action()
    output.flush()
    os._exit(status)


def kill_with_descendants(pid: int) -> None:
    """Kill a process and all that it started, systems in sessions of their own too."""
    process = psutil.Process(pid)
    # Nothing new is started while the others are looked up.
    process.suspend()
    for descendant in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
