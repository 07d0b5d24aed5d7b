"""The model runner of a group: rank 0's own, whose steps the other ranks compute too."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_worker.adapters.reader import PackedAdapter
from gpu_worker.core.constraint import ConstraintSource
from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import BrokenRunnerError, InterruptedRunnerError, PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import StepResult
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.meeting import device_of
from gpu_worker.execution.ranks.messages import PlaceAdapter, encode
from gpu_worker.execution.ranks.replies import RankLostError
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp
from gpu_worker.layers.ranks import is_last
from shared.errors import HeadraceError

_MAX_IN_VAIN = 3
"""Times in a row that the group may be lost before a step has ended."""

_log = logging.getLogger(__name__)


class AdapterPlacingError(HeadraceError):
    """A rank has no room for an adapter."""


class GroupRunner:
    """Does what `ModelRunner` promises.

    A step that fails before the others were told of it fails as it does alone. One that fails later leaves them in
    the middle of a step that this rank has left: then, as when a rank is gone, they forget all sequences and meet anew.
    """

    def __init__(self, runner: TorchModelRunner, group: RankGroup) -> None:
        self.own = runner
        self.group = group
        self._was_told = False
        self._num_in_vain = 0
        # By slot, the encoded pieces of the adapter that all ranks have there, and its rank: new ranks need them all.
        self._adapters: dict[int, tuple[Sequence[bytes], int]] = {}
        self._num_placed = 0
        # Of several stages each computes a plan meanwhile.
        self.max_steps_in_flight = max(runner.max_steps_in_flight, group.ranks.num_stages)
        runner.share_drafts = self._tell
        group.begin()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Do what `ModelRunner` promises.

        Raises:
            InterruptedRunnerError: The group is lost.
        """
        self.check()
        self._was_told = False
        try:
            return _GroupStep(self.own.submit(plan), self)
        except Exception as error:
            if not self._was_told:
                raise
            raise self.interruption(error) from None

    def check(self) -> None:
        """Fail if the group is lost.

        Raises:
            InterruptedRunnerError: It is.
        """
        if self.group.lost is not None:
            raise InterruptedRunnerError(RankLostError(self.group.lost), self._recover)

    def interruption(self, error: Exception) -> BrokenRunnerError:
        """Lose the group, unless that is why a step failed, and return what says so.

        A runner that loses it again and again, and computes nothing in between, is broken.
        """
        self._num_in_vain += 1
        if (problem := self.group.cause()) is None:
            _log.error("rank 0 failed within a step", exc_info=error)
            problem = f"rank 0 failed within a step: {type(error).__name__}: {error}"
            self.group.end(problem)
        lost = RankLostError(problem)
        if self._num_in_vain > _MAX_IN_VAIN:
            return BrokenRunnerError(lost, is_logged=True)
        return InterruptedRunnerError(lost, self._recover)

    def landed(self, step: int) -> None:
        """Take note that a step was computed."""
        self._num_in_vain = 0
        self.group.note_step(step)

    def place_adapter(self, slot: int, adapter: PackedAdapter) -> None:
        """Place an adapter in a slot that no step reads, at all ranks, in the thread that submits steps.

        Raises:
            Exception: A rank cannot. Then the slot is empty at all of them.
        """
        targets = self.own.model.adapters
        assert targets is not None
        assert adapter.pieces
        self._adapters.pop(slot, None)
        try:
            targets.place(slot, adapter.packed, adapter.max_rank)
            self._place_at_others(slot, adapter.pieces, adapter.max_rank)
        except Exception:
            targets.place(slot, None)
            self.group.send([encode(PlaceAdapter(0, slot))])
            raise
        self._adapters[slot] = adapter.pieces, adapter.max_rank

    def _place_at_others(self, slot: int, pieces: Sequence[bytes], max_rank: int) -> None:
        if self.group.lost is not None:
            raise RankLostError(self.group.lost)
        self._num_placed += 1
        self.group.send([*pieces, encode(PlaceAdapter(self._num_placed, slot, max_rank))])
        if (problem := self.group.placed(self._num_placed)) is not None:
            raise AdapterPlacingError(problem)

    def _recover(self) -> None:
        """Form the group again; adapters that cannot be placed at all ranks lose it again, which is in vain."""
        self.group.reform(self.own.num_blocks, self.own.restart)
        try:
            for slot, (pieces, max_rank) in self._adapters.items():
                self._place_at_others(slot, pieces, max_rank)
        except HeadraceError as error:
            self._num_in_vain += 1
            self.group.end(f"an adapter cannot be placed again: {error}")
            if self._num_in_vain > _MAX_IN_VAIN:
                raise BrokenRunnerError(error, is_logged=True) from error

    def _tell(self, plan: StepPlan, drafts: list[Draft] | None) -> list[Draft] | None:
        self._was_told = True
        self.group.tell(plan, drafts)
        return drafts


@dataclass(frozen=True, slots=True)
class _GroupStep:
    pending: PendingStep
    runner: GroupRunner

    def result(self) -> StepResult:
        """Do what `PendingStep` promises.

        Raises:
            InterruptedRunnerError: The group is lost.
        """
        try:
            result = self.pending.result()
            if not is_last(self.runner.group.ranks):
                result = self.runner.group.landed()
        except Exception as error:
            raise self.runner.interruption(error) from None
        self.runner.landed(result.step)
        return result


def build_group_runner(
    config: RunnerConfig, group: RankGroup, start_up: StartUp, constraints: ConstraintSource | None = None
) -> GroupRunner:
    """Build rank 0's runner while the other ranks build theirs.

    Raises:
        HeadraceError: One of them cannot.
    """
    with group.building():
        own = build_runner(replace(config, device=device_of(config, 0)), start_up, None, constraints, group.ranks)
    group.note_load()
    return GroupRunner(own, group)
