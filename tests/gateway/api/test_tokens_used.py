"""What an answer counts against its key's tokens per minute, by how it ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from gateway.api.answer import Answer, Outcome
from gateway.api.generation_service import _tokens_used
from gateway.api.generation_starter import Membership
from gateway.errors import ApiError


@pytest.mark.parametrize(
    ("outcome", "status", "expected"),
    [
        (Outcome.COMPLETED, None, 7),
        (Outcome.DISCONNECTED, None, 3),
        # Its time was over: what was computed until then counts.
        (Outcome.FAILED, 408, 3),
        (Outcome.FAILED, 500, 0),
        (Outcome.FAILED, 503, 0),
    ],
)
def test_tokens_that_an_answer_costs_its_key(outcome: Outcome, status: int | None, expected: int) -> None:
    error = None if status is None else ApiError(status, "x", retry_after_s=1.0)
    answer = SimpleNamespace(num_tokens=7, error=error)
    membership = SimpleNamespace(tokens_used=lambda: 3)
    assert _tokens_used(cast("Answer", answer), cast("Membership", membership), outcome) == expected
