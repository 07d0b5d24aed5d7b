"""How long the stages of a vision tower take beside tokens of a prompt, learned from the steps that encode images.

It is known how many tokens have as much to compute as a stage. A stage is charged for the seconds that it took in
earlier steps, over those of a token. Too long a step delays every stream and too short a one costs little, so longer
ones are believed at once, and a stage that has not been measured begins with few embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gpu_worker.core.scheduler_config import StageCost

_MOST_CHANGE, _MOST_SLOWNESS = 2.0, 64.0
"""Of a stage's slowness, by a step, and at all: a disturbance is not believed."""
_SHARE_OF_SHORTER = 0.5
"""Of what a step took shorter than expected, that is believed."""
_LEAST_SEEN = 1 / 12
"""Shortest time of a stage that its first step is believed, as a share of the expected one."""
_UNKNOWN_SLOWNESS = 16.0
"""Of a stage that has not been measured: its first steps are short, and tell what it takes."""
_LEAST_ROWS = 16
"""Embeddings whose patches pass a stage at once, at least, unless the whole budget has no room for them."""
_SURE_ROWS, _MOST_GROWTH = 64, 2
"""Most embeddings that pass a stage at once, or factor on the most so far: larger parts may be slower."""
_Kind = tuple[StageCost, int]
"""Equal stages are equally fast; attention depends on the magnitude of tiles, too."""


class StageCharge(NamedTuple):
    """What a part of an image is charged for a stage, in tokens, and how much of it may pass at once.

    Attributes:
        row: For each embedding.
        fixed: On top, however many pass.
        least_rows, most_rows: That pass at once.
        is_first: It has not been measured; a step that does nothing else tells how long it takes.
    """

    row: float
    fixed: float
    least_rows: int
    most_rows: int
    is_first: bool


class StagePass(NamedTuple):
    """Embeddings that have passed a stage, and the patches of their image."""

    stage: int
    num_patches: int
    num_rows: int


@dataclass(slots=True)
class _Speed:
    """What steps have told of a stage.

    Attributes:
        seconds: How long it takes for each token that it costs.
        most_rows: The most embeddings that have passed it at once.
    """

    seconds: float
    most_rows: int


class StageSpeeds:
    """Written by the scheduler when a step lands."""

    def __init__(self, stages: tuple[StageCost, ...], max_rows: int) -> None:
        """Before steps are observed, each stage is as fast as it should be."""
        self._stages = stages
        self._max_rows = max_rows
        self._speeds: dict[_Kind, _Speed] = {}
        self._token_s: float | None = None
        self._batch_share = 1.0

    def charge(self, stage: int, num_patches: int, *, is_batch: bool) -> StageCharge:
        """Return what each embedding of an image costs in a stage."""
        kind = self._kind(stage, num_patches)
        row, speed = self._cost(kind, num_patches), self._speeds.get(kind)
        if is_batch:
            row *= self._batch_share
        if self._token_s is None:
            least, most = 1, self._max_rows
        elif speed is None:
            least, most = 1, _SURE_ROWS
        else:
            least, most = _LEAST_ROWS, max(_SURE_ROWS, _MOST_GROWTH * speed.most_rows)
        is_first = speed is None and self._token_s is not None
        return StageCharge(row, row * kind[0].fixed_rows, least, most, is_first)

    def observe(
        self, passes: Iterable[StagePass], encoding_s: float, token_s: float, batch_token_s: float | None = None
    ) -> None:
        """Learn how long stages take, from a step's `encoding_s`, and that a token of a prompt takes `token_s`.

        The first is rather too much, the second too little. Batch work has got its tokens for a time, in which a token
        takes `batch_token_s`.
        """
        self._token_s, self._batch_share = token_s, token_s / (batch_token_s or token_s)
        taken, rows = dict[_Kind, float](), dict[_Kind, int]()
        for stage, num_patches, count in passes:
            kind = self._kind(stage, num_patches)
            taken[kind] = taken.get(kind, 0.0) + self._cost(kind, num_patches) * (count + kind[0].fixed_rows)
            rows[kind] = max(rows.get(kind, 0), count)
        if not taken:
            return
        total = sum(taken.values())
        seen = max(_LEAST_SEEN, encoding_s / (token_s * total))
        squares = sum([cost**2 for cost in taken.values()])
        change = math.log(max(1 / _MOST_CHANGE, min(_MOST_CHANGE, seen))) * (1.0 if seen > 1.0 else _SHARE_OF_SHORTER)
        for kind, cost in taken.items():
            if (speed := self._speeds.get(kind)) is None:
                speed = self._speeds[kind] = _Speed(_UNKNOWN_SLOWNESS * seen * token_s, 0)
            else:
                # The least change of all that explains it: most to the stages that took most.
                speed.seconds *= math.exp(change * cost * total / squares)
            speed.seconds = max(token_s / _MOST_SLOWNESS, min(_MOST_SLOWNESS * token_s, speed.seconds))
            speed.most_rows = max(speed.most_rows, rows[kind])

    def _cost(self, kind: _Kind, num_patches: int) -> float:
        """Return what the patches of an embedding take, in tokens."""
        slowness, speed = 1.0, self._speeds.get(kind)
        if self._token_s is not None:
            slowness = _UNKNOWN_SLOWNESS if speed is None else speed.seconds / self._token_s
        return max(1e-9, (kind[0].row + kind[0].pair * num_patches) * slowness)

    def _kind(self, stage: int, num_patches: int) -> _Kind:
        cost = self._stages[stage]
        return cost, num_patches.bit_length() if cost.pair else 0
