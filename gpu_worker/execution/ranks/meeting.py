"""The ways in which ranks of one host meet: memory that they share, or a process group of torch.

CPUs sum through shared memory, where the kernels can be compiled; else by gloo, GPUs by NCCL.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from gpu_worker.execution.ranks.board import Board
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.ranks import Ranks
from kernels.collectives import Exchange
from kernels.cpu_library import cpu_library

# Reading the weights of a large model may take so long; death and standstill are noticed by others, and sooner.
_TIMEOUT = timedelta(minutes=60)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def meet(rank: int, board: Board, config: RunnerConfig, store: Path, *, is_shared: bool) -> Ranks:
    """Join the other ranks, and wait for them where that takes a process group.

    Args:
        rank: Number of this process.
        board: Of the group.
        config: Settings of all ranks.
        store: As `ProcessGroupRanks` has it.
        is_shared: All of them sum through the board; rank 0 has chosen so.
    """
    size, has_whole_experts = config.tensor_parallel_size, config.enable_expert_parallel
    if not is_shared:
        return ProcessGroupRanks(rank, size, store, torch.device(device_of(config, rank)), has_whole_experts)
    library = cpu_library()
    assert library is not None, "rank 0 has the kernels, and so have all others of its host"
    return SharedMemoryRanks(rank, size, board.exchange(rank, library), has_whole_experts)


def device_of(config: RunnerConfig, rank: int) -> str:
    """Return the device of a rank: a GPU each."""
    return f"cuda:{rank}" if config.device.startswith("cuda") else config.device


def leave(ranks: Ranks | None) -> None:
    """Leave the other ranks."""
    if isinstance(ranks, ProcessGroupRanks):
        ranks.close()


class SharedMemoryRanks:
    """This process among those that share memory."""

    def __init__(self, rank: int, size: int, exchange: Exchange, has_whole_experts: bool = False) -> None:
        """Sum by `exchange`."""
        self.rank = rank
        self.size = size
        self.has_whole_experts = has_whole_experts
        self.exchange = exchange

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        return self.exchange.sum(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        return self.exchange.gather(x)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        return x.copy_(self.gather(x.view(1, -1))[0, : x.numel()].view_as(x))


class ProcessGroupRanks:
    """This process among those of the group; there is one group a process."""

    def __init__(
        self, rank: int, size: int, store: Path, device: torch.device, has_whole_experts: bool = False
    ) -> None:
        """Join the group, and wait for the others.

        Args:
            rank: Number of this process.
            size: How many there are.
            store: A file that all of them open, in a folder that nobody else can.
            device: Where this rank computes.
            has_whole_experts: As `Ranks` has it.
        """
        # Ranks on one host talk to nobody else, and nobody else to them.
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", _LOOPBACK)
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backends, store=FileStore(str(store), size), rank=rank, world_size=size, timeout=_TIMEOUT
        )
        self.rank = rank
        self.size = size
        self.has_whole_experts = has_whole_experts
        self.exchange = None

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        dist.broadcast(x, src=0)
        return x
