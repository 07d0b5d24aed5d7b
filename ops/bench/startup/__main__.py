"""How long the engine takes to start from a checkpoint on disk, beside a plain read of the same files.

`python -m ops.bench.startup --shapes 8b` writes a checkpoint of that shape into a temporary folder and starts from it:
once with its files evicted from the page cache (`cold`) and once with them in it (`warm`); files of a file system in
memory cannot be evicted, so they have a `warm` start alone. Each start is a process of its own, or, with `--num-ranks`,
a group of them, each of which reads its part. It then serves a request twice and a mixed load, and counts the kernels
compiled meanwhile: none should be. On a GPU each row is followed by the lines of the worker's memory, and the driver's.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch

from gpu_worker.execution.batch.graph_shapes import CapturedSteps
from ops.bench.comparison import add_shapes
from ops.bench.gpu.results import machine_of
from ops.bench.make_model import SHAPES, write_checkpoint
from ops.bench.options import bench_parser, positive
from ops.bench.peers.engines import run_program
from ops.bench.record import ResultTable

_READ_BYTES = 16 << 20
_TIMEOUT_S = 900.0
_COLUMNS = (
    *("shape", "ranks", "graphs", "gb", "files", "plain_read_s", "load_s", "load_gb_per_s", "profile_s", "capture_s"),
    *("ready_s", "peak_rss_gb", "first_ms", "second_ms", "compiled"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, record a line for cold and one for warm files."""
    parser = bench_parser("startup", __doc__)
    add_shapes(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--num-ranks", type=positive, default=1, help="processes among which the model is divided")
    parser.add_argument("--cuda-graphs", choices=list(CapturedSteps), default=CapturedSteps.ALL, help="steps captured")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made; choose a real disk")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Nothing was started: torch finds no CUDA device (--device cpu starts on the host).", file=sys.stderr)
        return 2
    table = ResultTable("startup", _COLUMNS)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(prefix="headrace-startup-", dir=options.folder) as name:
            directory = Path(name)
            num_bytes = write_checkpoint(SHAPES[shape], directory)
            evict(directory)
            for files in ("warm",) if is_cached(directory) else ("cold", "warm"):
                facts: dict[str, object] = {"shape": shape, "ranks": options.num_ranks, "files": files}
                facts |= {"graphs": options.cuda_graphs, "gb": round(num_bytes / 1e9, 2)}
                started_with = (directory, options.device, str(options.num_ranks), options.cuda_graphs)
                start = partial(run_child, "startup.engine_start", *started_with)
                row = facts | measure(directory, num_bytes, start, is_cold=files == "cold")
                table.add(row, **machine_of(torch.device(options.device)))
                print("".join(f"    {line}\n" for line in memory_lines(row)), end="", flush=True)
    return 0


def memory_lines(row: Mapping[str, object]) -> list[str]:
    """Return what the worker says of its memory, then what the driver does, and kernels compiled too late."""
    names = ("driver_gb", "reserved_gb", "kv_cache_gb", "device_gb")
    lines = list(cast("list[str]", row.get("memory", [])))
    if "driver_gb" in row:
        lines.append("driver: " + ", ".join(f"{name.removesuffix('_gb')} {row[name]} GB" for name in names))
    late = cast("list[str]", row.get("compiled_kernels", []))
    return [*lines, *(f"compiled while serving: {name}" for name in late)]


def measure(
    directory: Path, num_bytes: int, start: Callable[[], dict[str, float]], *, is_cold: bool
) -> dict[str, object]:
    """Read the files plainly and start the engine, both from the same state; return seconds and GB/s of loading."""
    prepare: Callable[[Path], object] = evict if is_cold else read_plainly
    prepare(directory)
    read_s = read_plainly(directory)
    prepare(directory)
    engine = start()
    return {
        "plain_read_s": round(read_s, 4),
        **engine,
        "plain_read_gb_per_s": round(num_bytes / 1e9 / read_s, 2),
        "load_gb_per_s": round(num_bytes / 1e9 / engine["load_s"], 2),
    }


def run_child(module: str, directory: Path, *arguments: str) -> dict[str, float]:
    """Run a module that prints its times as one JSON line; `ready` counts from the start of the process.

    Raises:
        PeerUnavailableError: It failed.
    """
    started = time.time()
    output = run_program([sys.executable, "-m", f"ops.bench.{module}", str(directory), *arguments], _TIMEOUT_S)
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result | {"ready_s": round(result["ready_s"] - started, 3)}


def read_plainly(directory: Path) -> float:
    """Read all weights from beginning to end, and return the seconds."""
    buffer = bytearray(_READ_BYTES)
    started = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def evict(directory: Path) -> None:
    """Drop the files from the page cache, where the file system lets us."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(directory: Path) -> bool:
    """Return True where the beginning of a file lies in memory: the kernel does not evict it, or not at once."""
    library, resident = ctypes.CDLL(None, use_errno=True), ctypes.c_ubyte()
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            failed = library.mincore(ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(resident))
            # A view keeps the mapping from being closed.
            del first
            if not failed and resident.value & 1:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
