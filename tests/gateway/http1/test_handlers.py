"""How each request's handler ends; the exchange notes what it is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.errors import ApiError
from gateway.http1.exchange import Exchange
from gateway.http1.handlers import Handler, HandlerRunner


class Noting:
    """An exchange that notes what happens to it."""

    def __init__(self, path: str = "/x") -> None:
        self.head = SimpleNamespace(path=path)
        self.log: list[tuple[str, object]] = []

    def refuse(self, error: ApiError) -> None:
        self.log.append(("refuse", (error.status, error.code, error.retry_after_s)))

    def abandon(self) -> None:
        self.log.append(("abandon", None))


async def outcome(handler: Handler, exchange: Noting, *, is_limited: bool = False) -> list[tuple[str, object]]:
    runner = HandlerRunner(handler, frozenset({"/health"}))
    runner.run(cast("Any", exchange), is_limited=is_limited)
    await asyncio.gather(*runner._tasks.values())
    assert not runner._tasks
    return exchange.log


async def answer(exchange: Exchange) -> None:
    cast("Any", exchange).log.append(("answer", None))


def failing(error: BaseException) -> Handler:
    async def fail(exchange: Exchange) -> None:
        raise error

    return fail


async def test_handler_runs_once_and_its_exchange_is_let_go() -> None:
    assert await outcome(answer, Noting()) == [("answer", None), ("abandon", None)]


async def test_connection_that_is_one_too_many_is_answered_on_exempt_paths_alone() -> None:
    refusal = ("refuse", (503, "too_many_connections", 1.0))
    assert await outcome(answer, Noting("/x"), is_limited=True) == [refusal]
    assert await outcome(answer, Noting("/health"), is_limited=True) == [("answer", None), ("abandon", None)]


async def test_handler_that_fails_is_logged_and_its_answer_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    assert await outcome(failing(RuntimeError("a bug")), Noting()) == [("abandon", None)]
    assert "a handler failed" in caplog.text


async def test_handler_has_a_task_of_its_own_before_it_waits_for_anything() -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    async def handle(exchange: Exchange) -> None:
        # Asks for the task that it may have to cancel.
        async with asyncio.timeout(10):
            tasks.append(asyncio.current_task())
            await answer(exchange)

    assert await outcome(handle, Noting()) == [("answer", None), ("abandon", None)]
    assert tasks[0] not in (None, asyncio.current_task())


async def test_handlers_that_still_run_are_ended() -> None:
    exchanges = [Noting(), Noting()]

    async def wait(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    runner = HandlerRunner(wait)
    for exchange in exchanges:
        runner.run(cast("Any", exchange), is_limited=False)
    await asyncio.sleep(0)
    await runner.cancel_all()
    assert [exchange.log for exchange in exchanges] == [[("abandon", None)]] * 2
    assert not runner._tasks


async def test_handler_that_has_not_begun_is_let_go() -> None:
    exchange = Noting()
    runner = HandlerRunner(answer)
    runner.run(cast("Any", exchange), is_limited=False)
    await runner.cancel_all()
    assert (exchange.log, runner._tasks) == ([], {})
