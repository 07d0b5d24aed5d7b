"""The process of a rank above 0: `python -m gpu_worker.execution.ranks.member`.

It is told its settings and then plans through its standard input, computes each with its part of the model, and ends
with its parent, whatever it is doing then.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.ranks.board import Board
from gpu_worker.execution.ranks.meeting import device_of, meet
from gpu_worker.execution.ranks.messages import Failure, Hello, Order, Start, encode, receive
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from shared.errors import HeadraceError
from shared.telemetry import configure_logging

TICK_S = 0.1

_log = logging.getLogger(__name__)


def identity(config: RunnerConfig) -> dict[str, str]:
    """Return what all ranks must have alike: their files and what computes with them."""
    model = config.model
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return {
        "model": str(model.resolve()),
        "files of the model": hashlib.sha256(repr(seen).encode()).hexdigest()[:16],
        "settings": hashlib.sha256(encode(config)).hexdigest()[:16],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def main() -> int:
    """Be a rank until the parent closes the pipe; return the process's exit status."""
    # The parent drains at these, and ends its ranks by the pipe.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    told, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What libraries print must not come between messages.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start: Start | None = receive(told, Start)
    if start is None:
        return 0
    configure_logging(start.log_level, start.log_format, role="worker", rank=str(start.rank))
    board = Board(start.board_fd, start.runner.tensor_parallel_size)
    threading.Thread(target=_tick, args=(board, start.rank, os.getppid()), daemon=True).start()
    try:
        _serve(start, told, answers, board)
    except Exception as error:
        if not isinstance(error, HeadraceError):
            _log.exception("rank %d failed", start.rank)
        _tell(answers, Failure(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _serve(start: Start, told: IO[bytes], answers: IO[bytes], board: Board) -> None:
    config = start.runner
    _tell(answers, Hello(identity(config)))
    if receive(told, bool) is None:
        return
    ranks = meet(start.rank, board, config, Path(start.store), is_shared=start.is_shared)
    runner = build_runner(replace(config, device=device_of(config, start.rank)), ranks=ranks)
    follow(runner, told, board, start.rank)


def follow(runner: TorchModelRunner, told: IO[bytes], board: Board, rank: int) -> None:
    """Compute plans until there are no more."""
    drafts: deque[list[Draft] | None] = deque()

    def told_drafts(_: StepPlan, __: list[Draft] | None) -> list[Draft] | None:
        return drafts.popleft()

    runner.share_drafts = told_drafts
    in_flight: deque[tuple[Order, PendingStep]] = deque()

    def land() -> None:
        landed, pending = in_flight.popleft()
        pending.result()
        board.note_step(rank, landed.plan.step)

    while (order := receive(told, Order)) is not None:
        assert isinstance(order, Order)
        if in_flight and in_flight[-1][0].drafts is not None:
            # What follows verified drafts begins where those end that were right.
            land()
        drafts.append(order.drafts)
        in_flight.append((order, runner.submit(order.plan)))
        if len(in_flight) == runner.max_steps_in_flight:
            land()


def _tell(answers: IO[bytes], message: Hello | Failure) -> None:
    try:
        answers.write(encode(message))
        answers.flush()
    except BrokenPipeError:
        pass


def _tick(board: Board, rank: int, parent: int) -> None:
    """Show that this process runs; end it at once when its parent is gone."""
    ended = threading.Event()
    while not ended.wait(TICK_S):
        board.tick(rank)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Taking an interpreter with torch apart takes seconds on a busy machine; there is nothing to save.
    os._exit(status)
