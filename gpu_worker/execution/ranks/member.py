"""The process of a rank above 0: `python -m gpu_worker.execution.ranks.member`.

It reads its settings and then plans from its standard input, computes each plan with its part of the model, and ends
with its parent, whatever it is doing then. When another rank is lost it forgets all sequences, keeps its weights, and
waits for the next meeting.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import IO

import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.execution.build import build_replacement, build_runner, subnormals_flushed
from gpu_worker.execution.ranks import messages
from gpu_worker.execution.ranks.beside import BesideSteps
from gpu_worker.execution.ranks.board import Board
from gpu_worker.execution.ranks.meeting import GroupRanks, device_of, group_ranks
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.ranks.rank import is_last
from gpu_worker.models.revision import model_revision
from shared.errors import HeadraceError
from shared.features import own_version
from shared.telemetry import configure_logging

TICK_S = 0.1

_log = logging.getLogger(__name__)


def identity(config: RunnerConfig) -> dict[str, str]:
    """Return what all ranks must have alike: their files and what computes with them."""
    # A host may have them at another place, and other cores.
    names = {item.name for item in fields(config)} - {"model", "num_threads"}
    return {
        "revision of the model": model_revision(config.model),
        "version of Headrace": own_version(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        **{f"setting {name}": str(getattr(config, name)) for name in sorted(names)},
    }


def main() -> int:
    """Be a rank until the parent closes the pipe; return the process's exit status."""
    # The parent drains at these, and ends its ranks by the pipe.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    told, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What libraries print must not come between messages.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start = messages.receive(told, messages.START)
    if start is None:
        return 0
    configure_logging(start.log_level, start.log_format, role="worker", rank=str(start.rank))
    board = Board(start.board_fd, start.runner.num_ranks)
    ranks = group_ranks(start.rank, board, start.runner, is_shared=start.is_shared, interface=start.interface)
    threading.Thread(target=_tick, args=(board, ranks, os.getppid()), daemon=True).start()
    try:
        _tell(answers, messages.Hello(identity(start.runner)))
        with subnormals_flushed():
            return _Member(start.runner, ranks, board, answers).serve(told)
    except Exception as error:
        if not isinstance(error, HeadraceError):
            _log.exception("rank %d failed", start.rank)
        _tell(answers, messages.Failure(f"{type(error).__name__}: {error}"))
        return 1


class _Member:
    def __init__(self, config: RunnerConfig, ranks: GroupRanks, board: Board, answers: IO[bytes]) -> None:
        self._config = replace(config, device=device_of(config, ranks.number))
        self._ranks = ranks
        self._board = board
        self._answers = answers
        self._runner: TorchModelRunner | None = None
        self._beside: BesideSteps | None = None
        # The group is lost, and this rank has not been told to leave yet.
        self._is_lost = False
        self._drafts: deque[list[Draft] | None] = deque()
        self._in_flight: deque[tuple[messages.Order, PendingStep]] = deque()

    def serve(self, told: IO[bytes]) -> int:
        """Execute messages until there are no more; return the exit status. Errors of computing propagate."""
        while (command := messages.receive(told, messages.COMMANDS)) is not None:
            if isinstance(command, messages.Order):
                self._attempt(partial(self._compute, command))
            elif isinstance(command, messages.Task):
                self._attempt(partial(self._beside_steps.do, command))
            elif isinstance(command, messages.Meet):
                self._meet(command)
            elif isinstance(command, messages.Load):
                self._keep(build_replacement(self._config, command.num_blocks, self._ranks))
                self._beside_steps.restart(command.places)
                _tell(self._answers, messages.Ready(command.epoch))
            elif isinstance(command, messages.Leave):
                self._leave(command)
            else:
                _log.error("rank %d does not start: %s", self._ranks.number, command.problem)
                return 1
        return 0

    def _meet(self, command: messages.Meet) -> None:
        try:
            self._ranks.join(command.store)
            if self._runner is None:
                self._keep(build_runner(self._config, ranks=self._ranks))
            else:
                self._beside_steps.restart(command.places)
                self._runner.restart()
        except Exception:
            if not self._was_lost():
                raise
            self._is_lost = True

    def _keep(self, runner: TorchModelRunner) -> None:
        runner.share_drafts = lambda _, __: self._drafts.popleft()
        self._runner = runner
        self._beside = BesideSteps(runner.model, partial(_tell, self._answers))
        self._board.note_load(self._ranks.number)

    @property
    def _beside_steps(self) -> BesideSteps:
        assert self._beside is not None, "ranks meet before they get tasks beside steps"
        return self._beside

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            work()
        except Exception as error:
            self._is_lost = True
            if not self._was_lost():
                _log.exception("rank %d failed within a step", self._ranks.number)
                _tell(self._answers, messages.Stumbled(f"{type(error).__name__}: {error}"))

    def _compute(self, order: messages.Order) -> None:
        runner, in_flight = self._runner, self._in_flight
        assert runner is not None, "ranks meet before they compute"
        if in_flight and in_flight[-1][0].drafts is not None:
            # What follows verified drafts begins where those end that were right.
            self._land()
        self._drafts.append(order.drafts)
        in_flight.append((order, runner.submit(order.plan)))
        if len(in_flight) == runner.max_steps_in_flight:
            self._land()

    def _land(self) -> None:
        order, pending = self._in_flight.popleft()
        result = pending.result()
        if self._ranks.stage > 0 and self._ranks.rank == 0 and is_last(self._ranks):
            _tell(self._answers, messages.Landed(result))
        self._board.note_step(self._ranks.number, order.plan.step)

    def _leave(self, command: messages.Leave) -> None:
        self._ranks.leave()
        self._in_flight.clear()
        self._drafts.clear()
        self._is_lost = False
        _tell(self._answers, messages.Ready(command.epoch))

    def _was_lost(self) -> bool:
        """Return whether another rank is at fault for what failed, which may be known a little later."""
        deadline = time.monotonic() + 5 * TICK_S
        while not self._board.has_ended and time.monotonic() < deadline:
            time.sleep(TICK_S / 4)
        return self._board.has_ended


def _tell(answers: IO[bytes], message: messages.Reply) -> None:
    try:
        answers.write(messages.encode(message))
        answers.flush()
    except BrokenPipeError:
        pass


def _tick(board: Board, ranks: GroupRanks, parent: int) -> None:
    """Show that this process runs; end it at once when its parent is gone, and its collectives when the group is."""
    ended, has_aborted = threading.Event(), False
    while not ended.wait(TICK_S):
        board.tick(ranks.number)
        if os.getppid() != parent:
            os._exit(1)
        if board.has_ended and not has_aborted:
            ranks.abort()
        has_aborted = board.has_ended


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Taking an interpreter with torch apart takes seconds on a busy machine; there is nothing to save.
    os._exit(status)
