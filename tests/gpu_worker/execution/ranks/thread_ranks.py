"""Ranks as threads of one process: the arithmetic of a divided model, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from gpu_worker.core.constraint import ConstraintSource
from gpu_worker.core.draft import Draft
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import CompletedStep
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.ranks.board import make_board
from gpu_worker.execution.ranks.meeting import SharedMemoryRanks
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.ranks.rank import OneStage, Ranks
from kernels.cpu_library import cpu_library
from kernels.layer_cache import CachedTokens

S = TypeVar("S")
T = TypeVar("T")


class ThreadGroup:
    """Does what `ModelRunner` promises, with a runner in a thread for each rank; those behind rank 0 get its drafts."""

    max_steps_in_flight = 1

    def __init__(self, config: RunnerConfig, constraints: ConstraintSource) -> None:
        size, meeting = config.tensor_parallel_size, _Meeting(config.tensor_parallel_size)
        self._pool = ThreadPoolExecutor(size)
        kinds = {"has_whole_experts": config.enable_expert_parallel, "divides_sequences": config.enable_dp_attention}
        ranks = [ThreadRanks(number, size, meeting, **kinds) for number in range(size)]
        self.parts: set[int] = set()
        self.runners: list[TorchModelRunner] = self._each(
            range(size), lambda n: build_runner(config, constraints=None if n else constraints, ranks=ranks[n])
        )
        self._drafts: list[SimpleQueue[list[Draft] | None]] = [SimpleQueue() for _ in range(size)]
        self.runners[0].share_drafts = self._tell
        for runner, queue in zip(self.runners[1:], self._drafts[1:], strict=True):
            runner.share_drafts = lambda _, __, queue=queue: queue.get(timeout=60)

    def submit(self, plan: StepPlan) -> CompletedStep:
        """Compute a step at all ranks; rank 0 answers."""
        self.parts |= {item.part for item in plan.new}
        return CompletedStep(self._each(self.runners, lambda runner: runner.submit(plan).result())[0])

    def close(self) -> None:
        self._pool.shutdown()

    def _tell(self, _: StepPlan, drafts: list[Draft] | None) -> list[Draft] | None:
        for queue in self._drafts[1:]:
            queue.put(drafts)
        return drafts

    def _each(self, items: Iterable[S], work: Callable[[S], T]) -> list[T]:
        return [future.result(60) for future in [self._pool.submit(work, item) for item in items]]


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[torch.Tensor | None] = [None] * size


class ThreadRanks(OneStage):
    """A thread's view of the others; what all have put down is read between two barriers."""

    exchange = None

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: _Meeting,
        has_whole_experts: bool,
        context_size: int = 1,
        divides_sequences: bool = False,
    ) -> None:
        self.divides_sequences = divides_sequences
        self.tokens = CachedTokens(rank % context_size, context_size)
        self.rank = rank
        self.size = size
        self.has_whole_experts = has_whole_experts
        self._meeting = meeting

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._met(x, lambda tensors: torch.stack(tensors).sum(0))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._met(x, lambda tensors: torch.cat(tensors, dim=1))

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        first, step = self.rank - self.tokens.first, self.tokens.step
        return self._met(
            x, lambda parts: torch.stack([part[self.tokens.first] for part in parts[first : first + step]])
        )

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._met(x, lambda tensors: tensors[0].clone()))

    def least(self, number: int) -> int:
        return int(self.gather(torch.tensor([[number]])).min())

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def _met(self, x: torch.Tensor, read: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        meeting = self._meeting
        meeting.tensors[self.rank] = x
        meeting.barrier.wait()
        result = read([tensor for tensor in meeting.tensors if tensor is not None])
        meeting.barrier.wait()
        return result


def sharing_memory(size: int) -> Callable[[ThreadRanks], Ranks]:
    """Return what makes ranks that sum through memory, as processes on a CPU do, of those that are threads."""
    library = cpu_library()
    assert library is not None, "the tests need g++"
    board, config = make_board(size), RunnerConfig(Path(), tensor_parallel_size=size)
    return lambda ranks: SharedMemoryRanks(ranks.rank, config, board.exchange(ranks.rank, library))


def on_ranks(
    size: int, work: Callable[[ThreadRanks], T], *, has_whole_experts: bool = False, context_size: int = 1
) -> list[T]:
    """Let each rank do the same in a thread of its own, and return what each returned."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        ranks = ThreadRanks(rank, size, meeting, has_whole_experts, context_size)
        try:
            with torch.inference_mode():
                return work(ranks)
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
