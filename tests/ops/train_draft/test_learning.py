"""Students learn what comes behind each place, and not beside it: a target that always says the same is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.registry import read_model_config
from ops.train_draft.eagle import EagleStudent
from ops.train_draft.job import measure
from ops.train_draft.medusa import MedusaStudent
from ops.train_draft.optimization import Length, train
from ops.train_draft.rows import Batch, Rows
from ops.train_draft.small_model import SmallModelStudent, small_shape
from ops.train_draft.student import Student
from ops.train_draft.target import HiddenVectors, Vocabulary, read_vocabulary

Maker = Callable[[ModelConfig, Vocabulary, Path, Batch], Student]
STUDENTS: dict[str, Maker] = {
    "model": lambda config, vocabulary, *_: SmallModelStudent(config, vocabulary, small_shape(config, 64, 1)),
    "eagle": lambda config, vocabulary, folder, sample: EagleStudent(config, vocabulary, folder, 2, sample),
}


class Ring(torch.nn.Module):
    """A target that is sure of what follows each token: the next one of a ring of tokens.

    As a module it makes of each of the target's vectors the one that comes `ahead` places behind it.
    """

    def __init__(self, vocabulary: Vocabulary, ahead: int = 0) -> None:
        super().__init__()
        self._tokens, self._ahead = torch.arange(5, 14), ahead
        self._vectors = 30 * vocabulary.head[self._tokens]

    def rows(self) -> Rows:
        """Return rows that begin with each token of the ring."""
        starts = range(len(self._tokens))
        rows = Rows(torch.stack([self._tokens.roll(-start).repeat(3) for start in starts]), self._vectors.shape[1])
        for _ in rows.compute(cast("HiddenVectors", self)):
            pass
        return rows

    def of(self, row: torch.Tensor) -> torch.Tensor:
        return self._vectors.roll(-1, 0)[row - 5]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._vectors.roll(-self._ahead, 0)[(hidden @ self._vectors.T).argmax(-1)]


@pytest.mark.parametrize("kind", STUDENTS)
def test_what_always_follows_is_predicted_after_training(kind: str, target: Path) -> None:
    config, vocabulary = read_model_config(target), read_vocabulary(target)
    rows = Ring(vocabulary).rows()
    torch.manual_seed(0)
    student = STUDENTS[kind](config, vocabulary, target, rows.batch(torch.arange(9)))
    for _ in train(student, rows.batches(4, torch.Generator().manual_seed(0)), Length(60, None)):
        pass

    assert measure(student, rows, torch.full((9,), 9), 3).by_position == (1.0, 1.0, 1.0)


def test_heads_have_nothing_to_learn_once_each_knows_what_comes_behind_the_next(target: Path) -> None:
    vocabulary = read_vocabulary(target)
    student = MedusaStudent(read_model_config(target), vocabulary, 3, 1, shares_head=True)
    rows = Ring(vocabulary).rows()
    untaught = student.loss(rows.batch(torch.arange(9)))
    blocks = cast("torch.nn.ModuleList", cast("torch.nn.ModuleList", student.module)[0])
    for head in range(3):
        blocks[head] = Ring(vocabulary, ahead=head + 1)

    assert student.loss(rows.batch(torch.arange(9))) < 1e-3 < untaught
    assert measure(student, rows, torch.full((9,), 9), 3).by_position == (1.0, 1.0, 1.0)
