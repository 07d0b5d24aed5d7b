"""The command `python -m ops.bench.gpu.tune`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernels.gpu_config import gpu_of
from ops.bench.gpu.case import Entry
from ops.bench.gpu.run import GRACE_S, JobFailedError, run_apart
from ops.bench.gpu.timer import CudaTimer, Timer
from ops.bench.gpu.tune import tables
from ops.bench.gpu.tune.choice import Choice, Tuning, choose
from ops.bench.record import bench_parser

TABLES: dict[str, tuple[Tuning, ...]] = {
    "split_attention": tables.SPLIT_ATTENTION,
    "split_attention_8bit": tables.SPLIT_ATTENTION_8BIT,
    "chunk_attention": tables.CHUNK_ATTENTION,
    "sampling": (tables.SAMPLING,),
    "packed_linear": tables.PACKED_LINEAR,
    "scaled_linear": tables.SCALED_LINEAR,
    "rope_kv_write": (tables.ROPE_KV_WRITE,),
    "rms_norm": (tables.RMS_NORM,),
    "silu_mul": (tables.SILU_MUL,),
}
# What follows from the best entries of a table: up to how many rows our kernel is ahead of another way to multiply.
_FOLLOWING: dict[str, Callable[[torch.device, Timer, Mapping[int, Entry]], dict[str, Any]]] = {
    "packed_linear": tables.fused_rows,
    "scaled_linear": tables.kernel_rows,
}
_EPILOG = """\
On a bare machine with a GPU, which needs torch and triton only, from the root of the repository:

  PYTHONUNBUFFERED=1 python3 -m ops.bench.gpu.tune --limit-s 500

Nothing is written: copy the printed choices into the kernels' launch tables by hand. Run the bench before and
after. Each table has a process of its own; --only takes one at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; return 0 when all entries were decided, 1 when one was not, 2 when there is no GPU."""
    parser = bench_parser("gpu.tune", "Measure launches of the kernels, and print the best.", _EPILOG)
    parser.add_argument("--only", action="append", choices=TABLES, help="a table to tune; may be given again")
    parser.add_argument("--limit-s", type=float, default=500.0, help="start no entry after this many seconds")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("Nothing was tuned: torch finds no CUDA device.", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.limit_s
    names = options.only or list(TABLES)
    if len(names) == 1:
        return 0 if tune(names[0], torch.device("cuda", 0), CudaTimer(), deadline) else 1
    is_complete = True
    for name in names:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            run_apart(["ops.bench.gpu.tune", "--only", name, "--limit-s", f"{left_s}"], left_s + GRACE_S)
        except JobFailedError as error:
            print(f"{name}: {error}; not all of its entries were decided", flush=True)
            is_complete = False
    return 0 if is_complete else 1


def tune(name: str, device: torch.device, timer: Timer, deadline: float) -> bool:
    """Decide the entries of a table for the generation of a device, as far as time reaches; return whether all were."""
    chosen: dict[int, Entry] = {}
    generation = gpu_of(device).generation
    for tuning in TABLES[name]:
        if time.monotonic() > deadline:
            print(f"{tuning.label}: out of time")
            return False
        try:
            choice = choose(tuning, tuning.present(generation), device, timer)
        except RuntimeError as error:
            print(error, flush=True)
            return False
        print("\n".join(choice_lines(tuning, choice)), flush=True)
        chosen[tuning.key or 0] = choice.entry
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for following, value in _FOLLOWING[name](device, timer, chosen).items() if name in _FOLLOWING else ():
        print(f"{following} {generation.name}: {value}")
    return True


def choice_lines(tuning: Tuning, choice: Choice) -> list[str]:
    """Return the trials, the best first, those that are out last."""
    lines = [f"{tuning.label}: time over the best, then µs by problem"]
    for trial in sorted(choice.trials, key=lambda trial: trial.score):
        mark = "chosen" if trial.entry == choice.entry else "present" if trial is choice.trials[0] else ""
        entry = " ".join(f"{name}={value}" for name, value in trial.entry.items())
        times = " ".join(f"{seconds * 1e6:.1f}" for seconds in trial.seconds)
        lines.append(f"  {mark:<8}{trial.score:>7.3f}  {entry}: {trial.failure or times}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
