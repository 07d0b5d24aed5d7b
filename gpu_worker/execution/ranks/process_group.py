"""Ranks that meet in a process group of torch: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

# Reading the weights of a large model may take so long; death and standstill are noticed by others, and sooner.
_TIMEOUT = timedelta(minutes=60)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class ProcessGroupRanks:
    """This process among those of the group; there is one group a process."""

    def __init__(self, rank: int, size: int, store: Path, device: torch.device) -> None:
        """Join the group, and wait for the others.

        Args:
            rank: Number of this process.
            size: How many there are.
            store: A file that all of them open, in a folder that nobody else can.
            device: Where this rank computes.
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

    def gather_first(self, x: torch.Tensor) -> torch.Tensor | None:
        """Do what `Ranks` promises."""
        if self.rank > 0:
            dist.gather(x.contiguous(), dst=0)
            return None
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.gather(x.contiguous(), parts, dst=0)
        return torch.cat(parts, dim=1)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        dist.broadcast(x, src=0)
        return x
