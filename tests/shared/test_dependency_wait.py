from __future__ import annotations

import logging

import pytest
from nats.errors import ConnectionClosedError
from nats.errors import TimeoutError as NatsTimeoutError

from shared.dependency_wait import wait_for
from shared.errors import DependencyError


async def test_refusals_are_logged_once_until_the_action_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[object] = [DependencyError("the stream is missing"), NatsTimeoutError(), OSError(), "made"]

    async def act() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with caplog.at_level(logging.WARNING):
        assert await wait_for("a stream", act, retry_s=0.0) == "made"
    assert caplog.messages == ["waiting for a stream: the stream is missing"]


async def test_connection_that_is_over_ends_the_wait() -> None:
    async def act() -> None:
        raise ConnectionClosedError

    with pytest.raises(DependencyError, match="while a stream was waited for"):
        await wait_for("a stream", act)


async def test_errors_of_our_own_are_not_waited_out() -> None:
    async def act() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await wait_for("a stream", act)
