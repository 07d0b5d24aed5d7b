"""The ways in which ranks of one host meet: memory that they share, or a process group of torch.

CPUs sum through shared memory, where the kernels can be compiled; else by gloo, GPUs by NCCL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import sys
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group

from gpu_worker.execution.ranks.board import Board
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.ranks.rank import OneStage
from kernels.collectives import Exchange
from kernels.cpu_library import cpu_library
from kernels.layer_cache import CachedTokens

# Reading the weights of a large model may take so long; death and standstill are noticed by others, and sooner.
_TIMEOUT = timedelta(minutes=60)
# The tag of what rank 0 sends the last stage, apart from the stream.
_SHARED = 1
_STORE_TIMEOUT = timedelta(seconds=60)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def group_ranks(number: int, board: Board, config: RunnerConfig, *, is_shared: bool, interface: str = "") -> GroupRanks:
    """Return a rank that has not met the others yet."""
    if not is_shared:
        return ProcessGroupRanks(number, config, interface)
    library = cpu_library()
    assert library is not None, "rank 0 has the kernels, and so have all others of its host"
    return SharedMemoryRanks(number, config, board.exchange(number, library))


def device_of(config: RunnerConfig, rank: int) -> str:
    """Return the device of a rank: a GPU each."""
    return f"cuda:{rank % config.ranks_per_host}" if config.device.startswith("cuda") else config.device


class _ConfiguredRank:
    """Which part of the model a rank has, by the settings."""

    def __init__(self, number: int, config: RunnerConfig) -> None:
        self.number = number
        self.size, self.num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self.stage, self.rank = divmod(number, self.size)
        self.has_whole_experts = config.enable_expert_parallel
        self.divides_sequences = config.enable_dp_attention
        self.num_redundant_experts = config.moved_experts
        context_size = config.decode_context_parallel_size
        self.tokens = CachedTokens(number % context_size, context_size)


class SharedMemoryRanks(_ConfiguredRank, OneStage):
    """This process among those that share memory."""

    def __init__(self, number: int, config: RunnerConfig, exchange: Exchange) -> None:
        super().__init__(number, config)
        self.exchange = exchange
        self.sum, self.gather = exchange.sum, exchange.gather

    def join(self, store: str = "") -> None:
        """Do nothing: who waits for another rank looks at the board."""

    abort = leave = join

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        first, step = self.rank - self.tokens.first, self.tokens.step
        return self.gather(x.reshape(1, -1)).view(self.size, *x.shape)[first : first + step, self.tokens.first]

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        return x.copy_(self.gather(x.view(1, -1))[0, : x.numel()].view_as(x))

    def least(self, number: int) -> int:
        """Do what `Ranks` promises."""
        return int(self.gather(torch.tensor([[number]])).min())


class ProcessGroupRanks(_ConfiguredRank):
    """This process among those of the group; there is one group a process."""

    def __init__(self, number: int, config: RunnerConfig, interface: str = "") -> None:
        super().__init__(number, config)
        self._group: dist.ProcessGroup | None = None
        self._context: dist.ProcessGroup | None = None
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.exchange = None
        self._device = torch.device(device_of(config, number))
        # Ranks on one host talk only to one another.
        self._interface = interface or _LOOPBACK
        self._sockets: list[tuple[int, int]] = []

    def join(self, store: str) -> None:
        """Meet the other ranks by `store`, which is new, and the same for all of them."""
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", self._interface)
        is_on_gpu = self._device.type == "cuda"
        if is_on_gpu:
            torch.cuda.set_device(self._device)
        before = _open_sockets()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo",
            store=_store(store, self.size * self.num_stages),
            rank=self.number,
            world_size=self.size * self.num_stages,
            timeout=_TIMEOUT,
        )
        self._sent.clear()
        self._group = self._group_of(self.size)
        self._context = None if self.tokens.step == 1 else self._group_of(self.tokens.step)
        self._sockets = [] if is_on_gpu else sorted(_open_sockets() - before)

    def abort(self) -> None:
        """Make threads that wait for another rank fail; the group is left until `join`. Any thread may call it."""
        sockets, self._sockets = self._sockets, []
        # Gloo's own `abort` does not release a rank that waits for a stopped process.
        for fd, _ in _open_sockets().intersection(sockets):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                # Gloo ends the process when it can listen no more.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized():
            # A group that is being left, or is broken, may refuse.
            with contextlib.suppress(Exception):
                _abort_process_group()

    leave = abort

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        x = x.contiguous()
        result = torch.empty_like(x)
        # As bytes, since gloo does not know all types.
        dist.all_to_all_single(result.view(torch.uint8), x.view(torch.uint8), group=self._context)
        return result

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        if self.stage > 0 and self.rank == 0:
            dist.recv(x, src=0, tag=_SHARED)
        if self.size > 1:
            dist.broadcast(x, src=self.number - self.rank, group=self._group)
        return x

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Do what `Ranks` promises."""
        dist.recv(x, src=self.number - self.size)
        return x

    def send(self, x: torch.Tensor) -> None:
        """Do what `Ranks` promises."""
        self._send(x.contiguous(), self.number + self.size, 0)

    def tell_last(self, x: torch.Tensor) -> None:
        """Do what `Ranks` promises."""
        self._send(x.clone(), self.size * (self.num_stages - 1), _SHARED)

    def least(self, number: int) -> int:
        """Do what `Ranks` promises."""
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def _group_of(self, count: int) -> dist.ProcessGroup | None:
        """Return this process's group of `count` consecutive processes; None is the group of all."""
        num_all = self.size * self.num_stages
        if count == num_all:
            return None
        # All processes make all groups.
        firsts = range(0, num_all, count)
        groups: list[dist.ProcessGroup] = [
            dist.new_group(list(range(first, first + count)), timeout=_TIMEOUT) for first in firsts
        ]
        return groups[self.number // count]

    def _send(self, x: torch.Tensor, to: int, tag: int) -> None:
        """Send without waiting; the tensor is kept until the send is complete."""
        work = dist.isend(x, dst=to, tag=tag)
        assert work is not None
        self._sent.append((work, x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()


GroupRanks = SharedMemoryRanks | ProcessGroupRanks
"""A rank that can leave the others, and meet them again; `number` is its own among those of all stages."""


def serve_store(address: str) -> tuple[str, TCPStore]:
    """Return what ranks of several hosts meet by, and what serves it at an address of this one, and no other."""
    listener = socket.create_server((address, 0))
    port, prefix = listener.getsockname()[1], secrets.token_hex(16)
    store = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return f"tcp:{address}:{port}:{prefix}", store


def _store(store: str, size: int) -> Store:
    """Open what ranks meet by. The names that they use on a network cannot be guessed."""
    if not store.startswith("tcp:"):
        return FileStore(store, size)
    _, address, port, prefix = store.split(":")
    return PrefixStore(prefix, TCPStore(address, int(port), None, False, timeout=_STORE_TIMEOUT))


def _open_sockets() -> set[tuple[int, int]]:
    """Return the connections of this process: descriptors, and the numbers by which the system tells sockets apart."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            state = os.fstat(int(name))
            if stat.S_ISSOCK(state.st_mode):
                found.add((int(name), state.st_ino))
    return found
