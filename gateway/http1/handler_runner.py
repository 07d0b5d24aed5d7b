"""Runs the handler of each request, and answers for one that fails.

A handler begins in the call that has brought its request, without a turn of the event loop between: on an idle system
that turn is a good part of the time until the request is on its way. When it first waits for something it becomes a
task. Before that it has none, so what asks for its own task (`asyncio.timeout`, Starlette) comes after an
`asyncio.sleep(0)`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError
from gateway.http1.exchange import Exchange

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]

_logger = logging.getLogger(__name__)


class HandlerRunner:
    """The handlers of one server that run now."""

    def __init__(self, handler: Handler, exempt_paths: frozenset[str] = frozenset()) -> None:
        """Answer with `handler`. `exempt_paths` are answered on connections beyond the limit, too."""
        self._handler = handler
        self._exempt_paths = exempt_paths
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}
        # uvloop's time is that of the turn, in milliseconds.
        self._began_at = -math.inf

    def run(self, exchange: Exchange, *, is_limited: bool, at_once: bool = False) -> None:
        """Answer an exchange.

        Args:
            exchange: What to answer.
            is_limited: Its connection is one too many: most requests are refused.
            at_once: Begin in this call, unless another has begun so in this turn of the event loop: what comes together
                costs less if each step is done for all of it.
        """
        if is_limited and exchange.head.path not in self._exempt_paths:
            message = "This gateway holds as many connections as it may. Try again shortly."
            exchange.refuse(ApiError(503, message, code="too_many_connections", retry_after_s=1.0))
            return
        running = self._run(exchange)
        now = self._loop.time()
        if at_once and now != self._began_at:
            self._began_at = now
            try:
                awaited = running.send(None)
            except StopIteration:
                return
            running = _resumed(running, awaited)
        self._tasks[exchange] = self._loop.create_task(running)

    async def cancel_all(self) -> None:
        """End the handlers that still run."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # One that had not begun has not taken itself out.
        self._tasks.clear()

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except ClientGoneError:
            pass
        except ApiError as error:
            if not exchange.started:
                exchange.respond_error(error)
        except Exception:
            _logger.exception("a request failed")
            if not exchange.started:
                exchange.refuse(ApiError(500, "The server failed to handle the request.", code="internal_error"))
        finally:
            self._tasks.pop(exchange, None)
            # Cutting the connection is the only way left to say that an answer is incomplete.
            exchange.abandon()


async def _resumed(begun: Coroutine[Any, Any, None], awaited: object) -> None:
    """Go on with a coroutine that has begun and waits for `awaited`."""
    await _rest(begun, awaited)


@types.coroutine
def _rest(begun: Coroutine[Any, Any, None], awaited: object) -> Generator[Any, Any, None]:
    try:
        yield awaited
    except BaseException as error:
        try:
            awaited = begun.throw(error)
        except StopIteration:
            return
        yield from _rest(begun, awaited)
    else:
        yield from begun
