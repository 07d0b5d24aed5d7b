"""The model runner of a group: rank 0's own, whose steps the other ranks compute too."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from gpu_worker.core.constraint import ConstraintSource
from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import BrokenRunnerError, PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import StepResult
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.ranks.group import RankGroup, RankLostError
from gpu_worker.execution.ranks.meeting import device_of
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp

_log = logging.getLogger(__name__)


class GroupRunner:
    """Does what `ModelRunner` promises.

    A step that fails before the others were told of it fails as it does alone. One that fails later leaves them in
    the middle of a step that this rank has left: that ends the group.

    Attributes:
        own: This rank's runner.
        group: The other ranks.
    """

    def __init__(self, runner: TorchModelRunner, group: RankGroup) -> None:
        """Tell the other ranks of all steps from now on."""
        self.own = runner
        self.group = group
        self._was_told = False
        self.max_steps_in_flight = runner.max_steps_in_flight
        runner.share_drafts = self._tell
        group.begin()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Do what `ModelRunner` promises.

        Raises:
            BrokenRunnerError: The group has ended.
        """
        self.group.check()
        self._was_told = False
        try:
            return _GroupStep(self.own.submit(plan), self.group)
        except Exception as error:
            if not self._was_told:
                raise
            raise _ended(self.group, error) from None

    def _tell(self, plan: StepPlan, drafts: list[Draft] | None) -> list[Draft] | None:
        self._was_told = True
        self.group.tell(plan, drafts)
        return drafts


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step that all ranks compute."""

    pending: PendingStep
    group: RankGroup

    def result(self) -> StepResult:
        """Do what `PendingStep` promises.

        Raises:
            BrokenRunnerError: The group has ended.
        """
        try:
            return self.pending.result()
        except Exception as error:
            raise _ended(self.group, error) from None


def _ended(group: RankGroup, error: Exception) -> BrokenRunnerError:
    """End the group, unless that is why the step failed, and say what it was."""
    if (problem := group.cause()) is not None:
        return BrokenRunnerError(RankLostError(problem), is_logged=True)
    _log.error("rank 0 failed within a step", exc_info=error)
    group.end(f"rank 0 failed within a step: {type(error).__name__}: {error}")
    return BrokenRunnerError(error, is_logged=True)


def build_group_runner(
    config: RunnerConfig, group: RankGroup, start_up: StartUp, constraints: ConstraintSource | None = None
) -> GroupRunner:
    """Build rank 0's runner while the other ranks build theirs.

    Raises:
        HeadraceError: One of them cannot.
    """
    with group.building():
        own = build_runner(replace(config, device=device_of(config, 0)), start_up, None, constraints, group.ranks)
    return GroupRunner(own, group)
