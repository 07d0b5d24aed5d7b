"""What a rank above 0 does beside steps, in one thread: packs adapters, and reads experts that move here.

Rank 0 sends adapters whole, a matrix at a time; each rank keeps what its features need. Finished work is kept
by number until rank 0 says, between two steps, to use or drop it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from gpu_worker.execution.ranks import messages
from gpu_worker.layers.adapters import AdapterTargets, Packed
from gpu_worker.models.decoder import CausalLM
from kernels.low_rank import LowRank, LowRankPart

_log = logging.getLogger(__name__)


class BesideSteps:
    """Works for one model; `answer` is called in either thread."""

    def __init__(self, model: CausalLM, answer: Callable[[messages.Done], object]) -> None:
        self._model = model
        self._answer = answer
        self._thread = ThreadPoolExecutor(1, "beside-steps")
        # By matrix, the received part of the adapter that is being sent, and its error.
        self._low_ranks: dict[str, LowRank] = {}
        self._error: Exception | None = None
        self._adapters: dict[int, tuple[Packed, int]] = {}
        self._experts: tuple[messages.PrepareExperts, Mapping[int, Any]] | None = None

    def do(self, task: messages.Task) -> None:
        """Begin a task, or, between two steps, place the adapter or move the experts that an earlier one made ready.

        Raises:
            Exception: Experts cannot move, though they were read.
        """
        if isinstance(task, messages.AdapterPiece):
            self._thread.submit(self._receive, task)
        elif isinstance(task, messages.PackAdapter):
            self._thread.submit(self._try, task.number, lambda: self._pack(task))
        elif isinstance(task, messages.PlaceAdapter):
            self._place(task)
        elif isinstance(task, messages.PrepareExperts):
            self._thread.submit(self._try, task.number, lambda: self._prepare(task))
        else:
            self._move(task.number)

    def restart(self, places: messages.Places) -> None:
        """Forget unfinished tasks, empty all slots, and place experts as rank 0 has them.

        Raises:
            Exception: An expert cannot be read.
        """
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "beside-steps")
        self._low_ranks, self._error = {}, None
        self._adapters.clear()
        self._experts = None
        if (targets := self._model.adapters) is not None:
            for slot in range(targets.num_slots):
                targets.place(slot, None)
        for experts, wanted in zip(self._model.placed_experts, places, strict=True):
            experts.restore(wanted)

    @property
    def _targets(self) -> AdapterTargets:
        assert self._model.adapters is not None, "adapters come to models that have places for them"
        return self._model.adapters

    def _try(self, number: int, work: Callable[[], object]) -> None:
        """Do what a number was given to, and say whether that could be done."""
        problem = None
        try:
            work()
        except Exception as error:
            _log.exception("what rank 0 asked for cannot be done")
            problem = f"{type(error).__name__}: {error}"
        self._answer(messages.Done(number, problem))

    def _receive(self, piece: messages.AdapterPiece) -> None:
        """Store a piece of an adapter; `_pack` raises its error, if any."""
        if self._error is None:
            try:
                matrix, parts = self._targets.matrices[piece.matrix], []
                for part in piece.parts:
                    features = torch.from_numpy(np.frombuffer(part.features, dtype=np.int64).copy())
                    down, up = _tensor(part.down, part.rank), _tensor(part.up, len(features))
                    parts.append(LowRankPart(down, up, part.scale, features))
                self._low_ranks[piece.matrix] = LowRank(tuple(parts), matrix.shape, matrix.is_gated)
            except Exception as error:
                self._error = error

    def _pack(self, task: messages.PackAdapter) -> None:
        """Pack what the pieces add up to; the next piece begins another adapter."""
        low_ranks, error = self._low_ranks, self._error
        self._low_ranks, self._error = {}, None
        if error is not None:
            raise error
        self._adapters[task.number] = self._targets.pack(low_ranks), task.max_rank

    def _place(self, task: messages.PlaceAdapter) -> None:
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

    def _prepare(self, task: messages.PrepareExperts) -> None:
        # Of one that rank 0 gave up.
        self._experts = None
        self._experts = task, self._model.placed_experts[task.layer].prepare(task.places)

    def _move(self, number: int) -> None:
        assert self._experts is not None
        (prepared, experts), self._experts = self._experts, None
        assert prepared.number == number
        self._model.placed_experts[prepared.layer].adopt(prepared.places, experts)


def encoded_pieces(adapter: Mapping[str, LowRank]) -> list[bytes]:
    """Return an adapter's part beside each matrix, as `RankGroup.send` takes it."""
    pieces = []
    for name, low_rank in adapter.items():
        parts = [
            messages.AdapterPart(
                part.rank, part.scale, part.features.numpy().tobytes(), _numbers(part.down), _numbers(part.up)
            )
            for part in low_rank.parts
        ]
        pieces.append(messages.encode(messages.AdapterPiece(name, parts)))
    return pieces


def _numbers(matrix: torch.Tensor) -> messages.Numbers:
    return messages.Numbers(matrix.dtype is torch.bfloat16, matrix.contiguous().view(torch.uint8).numpy().tobytes())


def _tensor(numbers: messages.Numbers, num_rows: int) -> torch.Tensor:
    dtype = torch.bfloat16 if numbers.is_bfloat16 else torch.float32
    return torch.frombuffer(bytearray(numbers.data), dtype=dtype).view(num_rows, -1)
