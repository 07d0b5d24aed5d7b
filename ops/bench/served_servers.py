"""The servers that `served` compares: each is started as its users do, on a free port of loopback, and stopped.

Ours is the whole system as `headrace up` runs it: NATS, Redis where it is installed, a gateway and a worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from ops.bench.engine_peers import (
    PeerUnavailableError,
    Task,
    convert_for_llama,
    llama_program,
    llama_version,
    vllm_environ,
    vllm_python,
    vllm_version,
)
from ops.bench.served_streams import Address

OURS = "headrace"
_MODEL = "served"
_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 30.0
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Server:
    """A server to compare.

    Attributes:
        start: Runs it for a task, with room for its largest load, until the block ends.
        version: Says which version it is, once it has run.
    """

    name: str
    start: Callable[[Task], AbstractContextManager[Address]]
    version: Callable[[], str | None]


def servers(cache: Path, plain: Path, llama_precision: str) -> list[Server]:
    """Return all servers.

    Args:
        cache: Where peers are installed.
        plain: The model in bfloat16, which llama.cpp rounds itself; the others serve that of the task.
        llama_precision: What it rounds to.
    """
    llama, vllm = cache / "llama", cache / "vllm"
    return [
        Server(OURS, _headrace, lambda: None),
        Server("llama.cpp", partial(_llama, llama, plain, llama_precision), lambda: llama_version(llama)),
        Server("vLLM CPU", partial(_vllm, vllm), lambda: vllm_version(vllm)),
    ]


@contextmanager
def _headrace(task: Task) -> Iterator[Address]:
    settings = {"DTYPE": "bfloat16", "NUM_THREADS": str(task.num_threads), "SERVED_MODEL_NAME": _MODEL}
    environ = {f"HEADRACE_{name}": value for name, value in settings.items()}
    with tempfile.TemporaryDirectory(prefix="headrace-served-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "ops.cli", "up", "--port", "0", "--state-dir", f"{folder}/state"]
        command += ["--model", str(task.model), "--ready-file", str(ready)]
        with _running(command, environ, ready.exists):
            described = json.loads(ready.read_text())
            port = urlsplit(described["url"]).port
            assert port is not None
            yield Address(_HOST, port, _MODEL, described["api_key"])


@contextmanager
def _llama(home: Path, plain: Path, precision: str, task: Task) -> Iterator[Address]:
    port = _free_port()
    batch, prompt = max(load.batch for load in task.loads), max(load.prompt for load in task.loads)
    command = [str(llama_program(home, "llama-server")), "-m", str(convert_for_llama(plain, home, precision))]
    command += ["--host", _HOST, "--port", str(port), "--alias", _MODEL, "--offline", "-t", str(task.num_threads)]
    command += ["-np", str(batch), "-c", str(batch * _sequence_tokens(task)), "-b", "2048", "-ub", str(prompt)]
    with _running(command, {}, partial(_is_healthy, port)):
        yield Address(_HOST, port, _MODEL)


@contextmanager
def _vllm(home: Path, task: Task) -> Iterator[Address]:
    port = _free_port()
    batch, prompt = max(load.batch for load in task.loads), max(load.prompt for load in task.loads)
    command = [str(vllm_python(home)), "-m", "vllm.entrypoints.openai.api_server", "--model", str(task.model)]
    command += ["--host", _HOST, "--port", str(port), "--served-model-name", _MODEL, "--dtype", "bfloat16"]
    command += ["--max-model-len", str(_sequence_tokens(task)), "--max-num-seqs", str(batch)]
    command += ["--max-num-batched-tokens", str(max(prompt, 512)), "--disable-log-stats"]
    with _running(command, vllm_environ(task.num_threads), partial(_is_healthy, port)):
        yield Address(_HOST, port, _MODEL)


def max_tokens(batch: int, new: int) -> int:
    """Return how many tokens to ask for, so that `batch` streams have `new` decode steps together.

    Those whose prompts are computed first have as many tokens more as there are prompts.
    """
    return new + batch + 1


def _sequence_tokens(task: Task) -> int:
    """Return the tokens of the longest sequence, with a few to spare."""
    return max(load.prompt + max_tokens(load.batch, load.new) for load in task.loads) + 8


@contextmanager
def _running(command: list[str], environ: Mapping[str, str], is_ready: Callable[[], bool]) -> Iterator[None]:
    """Run a server until the block ends, which begins when it is ready.

    Raises:
        PeerUnavailableError: It ended, or was not ready in time; its last line is told.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with tempfile.TemporaryFile() as log:
        # A group of its own, so that nothing it started outlives it.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**inherited, **environ}, start_new_session=True
        )
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines() or ["no message"]
                    raise PeerUnavailableError(f"{Path(command[0]).name} did not start: {lines[-1][:200]}")
                time.sleep(0.1)
            yield
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection(_HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
