"""Runs the handler of each request as a task, and answers for one that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError
from gateway.http1.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]

_logger = logging.getLogger(__name__)


class HandlerRunner:
    """The handlers of one server that run now."""

    def __init__(self, handler: Handler, exempt_paths: frozenset[str] = frozenset()) -> None:
        """Answer with `handler`. `exempt_paths` are answered on connections beyond the limit, too."""
        self._handler = handler
        self._exempt_paths = exempt_paths
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}

    def run(self, exchange: Exchange, *, is_limited: bool) -> None:
        """Answer an exchange. On a connection that is one too many (`is_limited`), most are refused."""
        if is_limited and exchange.head.path not in self._exempt_paths:
            message = "This gateway holds as many connections as it may. Try again shortly."
            exchange.refuse(ApiError(503, message, code="too_many_connections", retry_after_s=1.0))
            return
        self._tasks[exchange] = self._loop.create_task(self._run(exchange))

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
