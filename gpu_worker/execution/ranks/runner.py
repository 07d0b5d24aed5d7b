"""The model runner of a group: rank 0's own, whose steps the other ranks compute too."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_worker.adapters.reader import PackedAdapter
from gpu_worker.core.constraint import ConstraintSource
from gpu_worker.core.draft import Draft
from gpu_worker.core.media import SharedImages
from gpu_worker.core.model_runner import BrokenRunnerError, InterruptedRunnerError, PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import StepResult
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.meeting import device_of
from gpu_worker.execution.ranks.messages import PackAdapter, PlaceAdapter, encode
from gpu_worker.execution.ranks.rebalancing import Rebalancing
from gpu_worker.execution.ranks.replies import RankLostError, RankProblemError
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp
from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.layers.ranks.rank import is_last
from shared.errors import HeadraceError

_MAX_IN_VAIN = 3
"""Times in a row that the group may be lost before a step has ended."""

_log = logging.getLogger(__name__)


class GroupRunner:
    """Does what `ModelRunner` promises.

    A step that fails before its plan was sent to the others fails as it does alone. One that fails later leaves them in
    the middle of a step that this rank has left: then, as when a rank is gone, they forget all sequences and meet anew.
    """

    def __init__(self, runner: TorchModelRunner, group: RankGroup, step_interval: int = 0) -> None:
        """Serve with this rank's own runner; experts may move every `step_interval` steps, where they do."""
        self.own = runner
        self.group = group
        self._was_told = False
        self._num_in_vain = 0
        # By slot, the encoded pieces of the adapter that all ranks have there, and its rank: new ranks need them all.
        self._adapters: dict[int, tuple[Sequence[bytes], int]] = {}
        # Adapters that the others have packed, and are not placed yet: the number that they are kept under.
        self._packed: dict[PackedAdapter, int] = {}
        self._sending = threading.RLock()
        # Of several stages each computes a plan meanwhile.
        self.max_steps_in_flight = max(runner.max_steps_in_flight, group.ranks.num_stages)
        runner.share_drafts = self._tell
        placed, loads = runner.model.placed_experts, runner.model.expert_loads()
        self.rebalancing = None
        if placed and loads is not None:
            self.rebalancing = Rebalancing(group, placed, loads, step_interval)
            group.places = lambda: [experts.places for experts in placed]
        group.begin()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Do what `ModelRunner` promises; `InterruptedRunnerError` if the group is lost."""
        self.check()
        if not plan.rows:
            # Images alone, which this rank encodes.
            return self.own.submit(plan)
        self._was_told = True
        try:
            if self.rebalancing is not None:
                self.rebalancing.before_step()
            self._was_told = False
            return _GroupStep(self.own.submit(plan), self)
        except Exception as error:
            if not self._was_told:
                raise
            raise self.interruption(error) from None

    def check(self) -> None:
        """Raise `InterruptedRunnerError` if the group is lost."""
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
        self.group.board.note_step(0, step)

    def prepare_adapter(self, adapter: PackedAdapter) -> None:
        """Have the other ranks pack an adapter beside steps, in the thread that read it.

        Whatever goes wrong is found when it is placed. They keep it until then, or until `forget_adapter`.
        """
        with contextlib.suppress(RankLostError, RankProblemError), self._sending:
            self._packed[adapter] = self._pack_at_others(adapter.pieces, adapter.max_rank, pauses=True)

    def forget_adapter(self, adapter: PackedAdapter) -> None:
        """Let the other ranks forget an adapter that was prepared, unless it was placed. As `place_adapter`."""
        if (number := self._packed.pop(adapter, None)) is not None:
            self.group.send([encode(PlaceAdapter(number, None))])

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Place an adapter, or None, in a slot that no step reads, at all ranks, in the thread that submits steps.

        Raises:
            Exception: A rank cannot. Then the slot is empty at all of them.
        """
        targets = self.own.model.adapters
        assert targets is not None
        self._adapters.pop(slot, None)
        if adapter is None:
            return self._clear(targets, slot)
        assert adapter.pieces
        try:
            targets.place(slot, adapter.packed, adapter.max_rank)
            number = self._packed.pop(adapter, None)
            self._place_at_others(slot, adapter.pieces, adapter.max_rank, number)
        except Exception:
            self._clear(targets, slot)
            raise
        self._adapters[slot] = adapter.pieces, adapter.max_rank

    def _clear(self, targets: AdapterTargets, slot: int) -> None:
        targets.place(slot, None)
        self.group.send([encode(PlaceAdapter(None, slot))])

    def _pack_at_others(self, pieces: Sequence[bytes], max_rank: int, *, pauses: bool = False) -> int:
        # The pieces of one adapter do not come between those of another.
        with self._sending:
            number = self.group.tasks.new_number()
            try:
                self.group.tasks.do(number, [*pieces, encode(PackAdapter(number, max_rank))], pauses=pauses)
            except RankProblemError:
                self.group.send([encode(PlaceAdapter(number, None))])
                raise
        return number

    def _place_at_others(self, slot: int, pieces: Sequence[bytes], max_rank: int, number: int | None = None) -> None:
        number = number or self._pack_at_others(pieces, max_rank)
        self.group.tasks.do(number, [encode(PlaceAdapter(number, slot))])

    def _recover(self) -> None:
        """Form the group again; adapters that cannot be placed at all ranks lose it again, which is in vain."""
        if self.rebalancing is not None:
            self.rebalancing.stop()
        # Who sends pieces of an adapter stops, because the group is lost.
        with self._sending:
            self._packed.clear()
            self.group.reform(self.own.cache.num_blocks, self._restart)
        try:
            for slot, (pieces, max_rank) in self._adapters.items():
                self._place_at_others(slot, pieces, max_rank)
        except HeadraceError as error:
            self._num_in_vain += 1
            self.group.end(f"an adapter cannot be placed again: {error}")
            if self._num_in_vain > _MAX_IN_VAIN:
                raise BrokenRunnerError(error, is_logged=True) from error

    def _restart(self) -> None:
        """Begin anew, with the placement of experts sent to the others: a move may have failed half-way here.

        Raises:
            Exception: An expert cannot be read. Then the group is not formed, and the worker ends.
        """
        for experts in self.own.model.placed_experts:
            experts.restore(experts.places)
        self.own.restart()

    def _tell(self, plan: StepPlan, drafts: list[Draft] | None) -> list[Draft] | None:
        self._was_told = True
        self.group.tell(plan, drafts)
        return drafts


@dataclass(frozen=True, slots=True)
class _GroupStep:
    pending: PendingStep
    runner: GroupRunner

    def result(self) -> StepResult:
        """Do what `PendingStep` promises; `InterruptedRunnerError` if the group is lost."""
        try:
            result = self.pending.result()
            if not is_last(self.runner.group.ranks):
                result = self.runner.group.landed()
        except Exception as error:
            raise self.runner.interruption(error) from None
        self.runner.landed(result.step)
        return result


def build_group_runner(
    config: RunnerConfig,
    group: RankGroup,
    start_up: StartUp,
    constraints: ConstraintSource | None = None,
    images: SharedImages | None = None,
) -> GroupRunner:
    """Build rank 0's runner while the other ranks build theirs; `HeadraceError` if one of them cannot."""
    with group.building():
        own_config = replace(config, device=device_of(config, 0))
        own = build_runner(own_config, start_up, None, constraints, group.ranks, images)
    group.board.note_load(0)
    return GroupRunner(own, group, config.eplb_step_interval)
