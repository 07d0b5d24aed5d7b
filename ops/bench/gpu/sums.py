"""Sums between several GPUs: NCCL, by which ranks sum, beside torch's kernels over symmetric memory, by size.

Run as `python -m ops.bench.gpu.sums [--num-ranks 8]`, with a process a GPU. With `--device cpu` the sum of ranks that
share memory is beside gloo. Appended to `results/sums.jsonl`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from gpu_worker.execution.ranks.board import Board, make_board
from kernels.cpu_library import cpu_library
from ops.bench.gpu.case import OURS
from ops.bench.record import ResultTable, add_list, bench_parser, positive

_ROWS = [1, 4, 16, 64, 256, 2048]
_CALLS_AT_ONCE, _ROUNDS = 20, 15
_SYMMETRIC = ("one_shot_all_reduce", "two_shot_all_reduce_", "multimem_all_reduce_")
Sum = Callable[[torch.Tensor], torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record; return 1 if a rank failed, 2 where there are fewer GPUs than ranks."""
    parser = bench_parser("gpu.sums", __doc__)
    parser.add_argument("--num-ranks", type=positive, default=2, help="processes, each with a GPU of its own")
    parser.add_argument("--hidden-size", type=positive, default=8192, help="numbers in a row; of a 70B model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what ranks sum on")
    add_list(parser, "--rows", int, _ROWS, "tokens of a step")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (found := torch.cuda.device_count()) < options.num_ranks:
        print(f"Nothing was run: {options.num_ranks} ranks take a GPU each, and torch finds {found}.", file=sys.stderr)
        return 2
    sizes = [(rows, options.hidden_size) for rows in options.rows]
    board = make_board(options.num_ranks)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        told = (options.num_ranks, options.device, str(Path(folder, "store")), board.fd, sizes)
        # Forked, so that all have the board.
        context = get_context("fork")
        ranks = [context.Process(target=_rank, args=(rank, *told)) for rank in range(options.num_ranks)]
        for rank in ranks:
            rank.start()
        left = {rank.sentinel for rank in ranks}
        while left:
            left.difference_update(wait(list(left)))
            # The others would wait for one that failed.
            for rank in ranks if any(rank.exitcode for rank in ranks) else ():
                rank.terminate()
    return int(any(rank.exitcode for rank in ranks))


def _rank(rank: int, num_ranks: int, device_type: str, store: str, board_fd: int, sizes: list[tuple[int, int]]) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    table = ResultTable("sums", ("rows", "bytes", "sum", "microseconds", "of_ours"), "gpu.sums")
    for size in sizes:
        x = torch.full(size, rank + 1.0, dtype=torch.bfloat16, device=device)
        sums = _sums_on_gpus(x) if device.type == "cuda" else _sums_on_cpus(rank, num_ranks, board_fd)
        times = {name: _seconds(partial(_checked, call, x, num_ranks)) for name, call in sums.items()}
        for name, seconds in times.items() if rank == 0 else ():
            row = {"rows": size[0], "bytes": x.nbytes, "sum": name, "microseconds": round(seconds * 1e6, 1)}
            table.add({**row, "of_ours": round(seconds / times[OURS], 2)}, ranks=num_ranks, device=device.type)
    dist.destroy_process_group()


def _sums_on_cpus(rank: int, num_ranks: int, board_fd: int) -> Mapping[str, Sum]:
    sums: dict[str, Sum] = {OURS: _all_reduce}
    if (library := cpu_library()) is not None:
        sums = {OURS: Board(board_fd, num_ranks).exchange(rank, library).sum, "gloo": _all_reduce}
    return sums


def _sums_on_gpus(like: torch.Tensor) -> Mapping[str, Sum]:
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    shared = symmetric.empty(like.shape, dtype=like.dtype, device=like.device)
    handle = symmetric.rendezvous(shared, group)

    def through_memory(name: str, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = getattr(torch.ops.symm_mem, name)(shared.copy_(x), "sum", group.group_name)
        return summed

    usable = _SYMMETRIC if handle.multicast_ptr else _SYMMETRIC[:2]
    return {OURS: _all_reduce, **{name.rstrip("_"): partial(through_memory, name) for name in usable}}


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _checked(call: Sum, x: torch.Tensor, num_ranks: int) -> Callable[[], torch.Tensor]:
    """Return the sum of numbers that are not changed by it, once it has been right."""
    expected = num_ranks * (num_ranks + 1) / 2
    if not bool((call(x.clone()) == expected).all()):
        raise RuntimeError(f"a sum of {tuple(x.shape)} numbers is not {expected:g}")
    return lambda: call(x.clone())


def _seconds(make: Callable[[], Callable[[], torch.Tensor]]) -> float:
    """Return the median time of a call among those made at once, the same number by each rank."""
    call, samples = make(), []
    for _ in range(_ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(_CALLS_AT_ONCE):
            result = call()
        if result.is_cuda:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - began) / _CALLS_AT_ONCE)
    return statistics.median(samples)


if __name__ == "__main__":
    sys.exit(main())
