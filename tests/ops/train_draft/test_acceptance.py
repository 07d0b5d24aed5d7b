from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ops.train_draft.job import measure
from ops.train_draft.rows import Batch, Rows


class Knowing:
    """Knows the rows' tokens, and is wrong where a token is one of `wrong`, by so far behind the place."""

    module = torch.nn.Module()

    def __init__(self, first_distance: int, wrong: Mapping[int, set[int]]) -> None:
        self.first_distance = first_distance
        self._wrong = wrong

    def draft_tokens(self, batch: Batch, count: int) -> torch.Tensor:
        drafts = [batch.token_ids.roll(-self.first_distance - step, 1) for step in range(count)]
        for step, tokens in enumerate(drafts):
            for token in self._wrong.get(step, ()):
                tokens[tokens == token] = -1
        return torch.stack(drafts, -1)

    def loss(self, batch: Batch) -> torch.Tensor:
        raise AssertionError("measuring needs drafts alone")

    def config(self) -> dict[str, Any]:
        raise AssertionError("measuring needs drafts alone")

    def tensors(self) -> Mapping[str, torch.Tensor]:
        raise AssertionError("measuring needs drafts alone")


@pytest.mark.parametrize("first_distance", [1, 2])
def test_a_wrong_token_counts_against_all_behind_it(first_distance: int) -> None:
    rows = Rows(torch.arange(20)[None], hidden_size=1)
    # The target wrote from place 10 on, and drafts of 3 hang behind the tokens 10 to 16.
    student = Knowing(first_distance, wrong={0: {11}, 1: {14, 15}})

    found = measure(student, rows, torch.tensor([10]), 3)

    assert found.num_drafts == 7
    assert found.by_position == pytest.approx((6 / 7, 4 / 7, 4 / 7))
    assert found.mean_length == pytest.approx(2)


def test_rows_too_short_for_a_draft_count_nothing() -> None:
    rows = Rows(torch.arange(20)[None].repeat(2, 1), hidden_size=1)

    assert measure(Knowing(1, {}), rows, torch.tensor([18, 18]), 3).num_drafts == 0
