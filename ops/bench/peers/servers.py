"""The servers that `served` compares: each is started as its users do, on a free port of loopback, and stopped.

Ours is the whole system as `headrace up` runs it: NATS, Redis where it is installed, a gateway and a worker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from ops.bench.peers.engines import (
    Task,
    convert_for_llama,
    llama_program,
    llama_version,
    vllm_environ,
    vllm_python,
    vllm_version,
)
from ops.bench.systems import HOST, headrace_up, own_settings, running
from ops.load_generator.connection import Address
from ops.stack.ports import free_port

_MODEL = "served"
_START_TIMEOUT_S = 900.0


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
    """Return all servers. llama.cpp rounds `plain`, the model in bfloat16, to `llama_precision` itself."""
    llama, vllm = cache / "llama", cache / "vllm"
    return [
        Server("headrace", _headrace, lambda: None),
        Server("llama.cpp", partial(_llama, llama, plain, llama_precision), lambda: llama_version(llama)),
        Server("vLLM CPU", partial(_vllm, vllm), lambda: vllm_version(vllm)),
    ]


@contextmanager
def _headrace(task: Task) -> Iterator[Address]:
    environ = own_settings(DTYPE="bfloat16", NUM_THREADS=task.num_threads, SERVED_MODEL_NAME=_MODEL)
    # No limit on the time to the first token: a burst of long prompts is measured here, not refused.
    arguments = ["--model", str(task.model), "--interactive-ttft-slo-s", str(_START_TIMEOUT_S)]
    with headrace_up(arguments, environ, _START_TIMEOUT_S) as info:
        port = urlsplit(info["url"]).port
        assert port is not None
        yield Address(HOST, port, _MODEL, info["api_key"])


@contextmanager
def _llama(home: Path, plain: Path, precision: str, task: Task) -> Iterator[Address]:
    batch, prompt = _largest(task)
    command = [str(llama_program(home, "llama-server")), "-m", str(convert_for_llama(plain, home, precision))]
    command += ["--alias", _MODEL, "--offline", "-t", str(task.num_threads), "-b", "2048", "-ub", str(prompt)]
    command += ["-np", str(batch), "-c", str(batch * _sequence_tokens(task))]
    with _running(command, {}) as address:
        yield address


@contextmanager
def _vllm(home: Path, task: Task) -> Iterator[Address]:
    batch, prompt = _largest(task)
    command = [str(vllm_python(home)), "-m", "vllm.entrypoints.openai.api_server", "--model", str(task.model)]
    command += ["--served-model-name", _MODEL, "--dtype", "bfloat16", "--max-num-seqs", str(batch)]
    command += ["--max-model-len", str(_sequence_tokens(task)), "--disable-log-stats"]
    command += ["--max-num-batched-tokens", str(max(prompt, 512))]
    with _running(command, vllm_environ(task.num_threads)) as address:
        yield address


def _largest(task: Task) -> tuple[int, int]:
    """Return the most sequences of a load, and the longest prompt."""
    return max(load.batch for load in task.loads), max(load.prompt for load in task.loads)


def max_tokens(batch: int, new: int) -> int:
    """Return how many tokens to ask for, so that `batch` streams have `new` decode steps together.

    Those whose prompts are computed first have as many tokens more as there are prompts.
    """
    return new + batch + 1


def _sequence_tokens(task: Task) -> int:
    """Return the tokens of the longest sequence, with a few to spare."""
    return max(load.prompt + max_tokens(load.batch, load.new) for load in task.loads) + 8


@contextmanager
def _running(command: list[str], environ: Mapping[str, str]) -> Iterator[Address]:
    """Run a server of others, on a free port, until the block ends, which begins when it is healthy.

    Raises:
        StartError: It ended, or was not ready in time.
    """
    port = free_port()
    command = [*command, "--host", HOST, "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        log, variables = Path(folder) / "server.log", own_settings() | dict(environ)
        with running(command, log, partial(_is_healthy, port), variables, _START_TIMEOUT_S):
            yield Address(HOST, port, _MODEL)


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
