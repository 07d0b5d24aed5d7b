"""The public port's handler: the two hot routes ahead of everything else."""

from __future__ import annotations

from gateway.api.app import HOT_ROUTES
from gateway.api.completions import Completions
from gateway.http1.exchange import Exchange
from gateway.http1.handler_runner import Handler

# Answered even where there are too many connections: a gateway that is busy is not to be taken for a dead one.
ALWAYS_SERVED = frozenset({"/health/live", "/health/ready"})


class Entrance:
    """Chooses who serves a request."""

    def __init__(self, completions: Completions, other: Handler) -> None:
        """Pass what is not hot on to `other`."""
        chat, completion = HOT_ROUTES
        self._hot: dict[str, Handler] = {chat: completions.chat, completion: completions.completion}
        self._other = other

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one request."""
        head = exchange.head
        hot = self._hot.get(head.path) if head.method == "POST" else None
        await (hot or self._other)(exchange)
