"""What a rank above 0 does beside steps, in one thread: packs adapters, and reads experts that move here.

What is ready is kept by its number until the rank is told, between two steps, to use it or to forget it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_worker.execution.ranks.adapters import ReceivedAdapter
from gpu_worker.execution.ranks.messages import (
    AdapterPiece,
    Done,
    PackAdapter,
    PlaceAdapter,
    Places,
    PrepareExperts,
    Task,
)
from gpu_worker.layers.adapters import AdapterTargets, Packed
from gpu_worker.models.decoder import CausalLM

_log = logging.getLogger(__name__)


class BesideSteps:
    """Works for one model; `answer` is called in either thread."""

    def __init__(self, model: CausalLM, answer: Callable[[Done], object]) -> None:
        self._model = model
        self._answer = answer
        self._thread = ThreadPoolExecutor(1, "beside-steps")
        self._received = None if model.adapters is None else ReceivedAdapter(model.adapters)
        self._adapters: dict[int, tuple[Packed, int]] = {}
        self._experts: tuple[PrepareExperts, Mapping[int, Any]] | None = None

    def do(self, task: Task) -> None:
        """Begin a task, or, between two steps, place the adapter or move the experts that an earlier one made ready.

        Raises:
            Exception: Experts cannot move, though they were read.
        """
        if isinstance(task, AdapterPiece):
            self._thread.submit(self._adapter_parts.add, task)
        elif isinstance(task, PackAdapter):
            self._thread.submit(self._try, task.number, lambda: self._pack(task))
        elif isinstance(task, PlaceAdapter):
            self._place(task)
        elif isinstance(task, PrepareExperts):
            self._thread.submit(self._try, task.number, lambda: self._prepare(task))
        else:
            self._move(task.number)

    def restart(self, places: Places) -> None:
        """Forget what was begun, empty all slots, and have experts where they are at rank 0.

        Raises:
            Exception: An expert cannot be read.
        """
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "beside-steps")
        self._adapters.clear()
        self._experts = None
        if self._received is not None:
            self._received.clear()
            for slot in range(self._targets.num_slots):
                self._targets.place(slot, None)
        for experts, wanted in zip(self._model.placed_experts, places, strict=True):
            experts.restore(wanted)

    @property
    def _targets(self) -> AdapterTargets:
        assert self._model.adapters is not None, "adapters come to models that have places for them"
        return self._model.adapters

    @property
    def _adapter_parts(self) -> ReceivedAdapter:
        assert self._received is not None, "adapters come to models that have places for them"
        return self._received

    def _try(self, number: int, work: Callable[[], object]) -> None:
        """Do what a number was given to, and say whether that could be done."""
        problem = None
        try:
            work()
        except Exception as error:
            _log.exception("what rank 0 asked for cannot be done")
            problem = f"{type(error).__name__}: {error}"
        self._answer(Done(number, problem))

    def _pack(self, task: PackAdapter) -> None:
        self._adapters[task.number] = self._adapter_parts.pack(), task.max_rank

    def _place(self, task: PlaceAdapter) -> None:
        slot, number = task.slot, task.number
        if number is not None and slot is not None:
            self._try(number, lambda: self._place_packed(slot, number))
        elif number is not None:
            self._adapters.pop(number, None)
        elif slot is not None:
            self._targets.place(slot, None)

    def _place_packed(self, slot: int, number: int) -> None:
        try:
            self._targets.place(slot, *self._adapters.pop(number))
        except Exception:
            self._targets.place(slot, None)
            raise

    def _prepare(self, task: PrepareExperts) -> None:
        # Of one that rank 0 gave up.
        self._experts = None
        self._experts = task, self._model.placed_experts[task.layer].prepare(task.places)

    def _move(self, number: int) -> None:
        assert self._experts is not None
        (prepared, experts), self._experts = self._experts, None
        assert prepared.number == number
        self._model.placed_experts[prepared.layer].adopt(prepared.places, experts)
