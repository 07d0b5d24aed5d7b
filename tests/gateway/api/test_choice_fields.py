"""A text that the context ended before its client's limit says so; every other end says no more than OpenAI's does."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.choice_fields import context_fields
from shared.messages import Finish, Usage
from tests.gateway.api.test_read_choice import deltas, streamed, whole

FULL = {"stop_reason": "model_context_window_exceeded"}


@pytest.mark.parametrize(
    ("finish", "max_tokens", "told"),
    [
        (Finish("length", Usage(3, 5)), 5, {}),
        (Finish("length", Usage(3, 5)), 6, FULL),
        (Finish("length", Usage(3, 5)), None, FULL),
        (Finish("stop", Usage(3, 5)), 6, {}),
        (Finish("length"), 6, {}),
    ],
)
def test_full_context_is_told_from_the_limit(finish: Finish, max_tokens: int | None, told: dict[str, str]) -> None:
    assert context_fields(finish, max_tokens) == told


@pytest.mark.parametrize(("reason", "told"), [("length", FULL), ("stop", {})])
async def test_choices_that_are_read_tell_it_in_their_last_piece_alone(reason: Any, told: dict[str, str]) -> None:
    said = [deltas(["C:a", "C:b"], Finish(reason, Usage(3, 2)))]
    [choice] = (await whole(said))["choices"]
    *before, last = [chunk["choices"][0] for chunk in await streamed(said)]
    for ended in (choice, last):
        assert {name: value for name, value in ended.items() if name == "stop_reason"} == told
    assert all("stop_reason" not in chunk for chunk in before)
