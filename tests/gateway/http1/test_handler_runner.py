"""How each request's handler ends, and what its client is told when it fails; the exchange notes what it is told."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError
from gateway.http1.exchange import Exchange
from gateway.http1.handler_runner import Handler, HandlerRunner


class Noting:
    """An exchange that notes what happens to it."""

    def __init__(self, path: str = "/x", *, started: bool = False) -> None:
        self.head = SimpleNamespace(path=path)
        self.started = started
        self.log: list[tuple[str, object]] = []

    def refuse(self, error: ApiError) -> None:
        self.log.append(("refuse", (error.status, error.code, error.retry_after_s)))

    def respond_error(self, error: ApiError) -> None:
        self.log.append(("respond", (error.status, error.code)))

    def abandon(self) -> None:
        self.log.append(("abandon", None))


async def outcome(
    handler: Handler, exchange: Noting, *, is_limited: bool = False, at_once: bool = False
) -> list[tuple[str, object]]:
    runner = HandlerRunner(handler, frozenset({"/health"}))
    runner.run(cast("Any", exchange), is_limited=is_limited, at_once=at_once)
    await asyncio.gather(*runner._tasks.values())
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


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ApiError(404, "No.", code="unknown_url"), [("respond", (404, "unknown_url"))]),
        (RuntimeError("a bug"), [("refuse", (500, "internal_error", None))]),
        (ClientGoneError(), []),
    ],
)
async def test_failure_is_told_unless_the_answer_has_begun(
    error: Exception, told: list[tuple[str, object]], at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert await outcome(failing(error), Noting(), at_once=at_once) == [*told, ("abandon", None)]
    assert await outcome(failing(error), Noting(started=True), at_once=at_once) == [("abandon", None)]
    assert ("a request failed" in caplog.text) is isinstance(error, RuntimeError)


async def test_handler_that_waits_for_nothing_has_ended_with_the_call() -> None:
    exchange = Noting()
    runner = HandlerRunner(answer)
    runner.run(cast("Any", exchange), is_limited=False, at_once=True)
    assert exchange.log == [("answer", None), ("abandon", None)]
    assert not runner._tasks


async def test_handler_that_waits_goes_on_in_a_task_with_what_it_waited_for() -> None:
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    second: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    noted: list[object] = []

    async def handle(exchange: Exchange) -> None:
        noted.append(asyncio.current_task())
        noted.append(await first)
        async with asyncio.timeout(10):
            try:
                await second
            except ValueError as error:
                noted.append(str(error))

    exchange = Noting()
    runner = HandlerRunner(handle)
    runner.run(cast("Any", exchange), is_limited=False, at_once=True)
    [task] = runner._tasks.values()
    assert noted == [asyncio.current_task()]
    first.set_result(1)
    await asyncio.sleep(0)
    second.set_exception(ValueError("a failure"))
    await task
    assert (noted[1:], exchange.log) == ([1, "a failure"], [("abandon", None)])


async def test_failure_of_what_a_handler_waits_for_first_reaches_it() -> None:
    awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handle(exchange: Exchange) -> None:
        with contextlib.suppress(ValueError):
            await awaited
        # Waits once more, in the middle of the failure's way.
        await asyncio.sleep(0)
        await answer(exchange)

    asyncio.get_running_loop().call_soon(awaited.set_exception, ValueError("a failure"))
    assert await outcome(handle, Noting(), at_once=True) == [("answer", None), ("abandon", None)]


@pytest.mark.parametrize("at_once", [False, True])
async def test_handlers_that_still_run_are_ended(at_once: bool) -> None:
    exchanges = [Noting(), Noting()]

    async def wait(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    runner = HandlerRunner(wait)
    for exchange in exchanges:
        runner.run(cast("Any", exchange), is_limited=False, at_once=at_once)
    await asyncio.sleep(0)
    await runner.cancel_all()
    assert [exchange.log for exchange in exchanges] == [[("abandon", None)]] * 2
    assert not runner._tasks
