"""Resources that all keys share and no key may monopolize: places for requests, bytes of bodies.

`Shares` refuse an excessive claim, `Turns` make it wait.

Dynamic thresholds: a key may hold at most a fixed multiple of the free part. One busy key alone gets nearly everything,
but something is always left for the others, and what several busy keys may hold shrinks as they come.

Source: A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from enum import Enum, auto


class Refusal(Enum):
    """Why nothing more is given."""

    ALL_TAKEN = auto()
    KEY_HAS_ITS_SHARE = auto()


class Shares:
    """Units of one thing, and how many each key holds."""

    __slots__ = ("_held", "_multiple", "total", "used")

    def __init__(self, total: int, multiple: int) -> None:
        """Let a key hold at most `multiple` times the free part: `multiple / (multiple + 1)` of `total`, if alone."""
        self.total = total
        self.used = 0
        self._multiple = multiple
        self._held: dict[str, int] = {}

    def take(self, key: str, num: int = 1) -> Refusal | None:
        """Give a key `num` more units, or return why not. A key without any gets its first while any are free."""
        free = self.total - self.used - num
        held = self._held.get(key, 0)
        if free < 0:
            return Refusal.ALL_TAKEN
        if held and held + num > self._multiple * free:
            return Refusal.KEY_HAS_ITS_SHARE
        self._held[key] = held + num
        self.used += num
        return None

    def give_back(self, key: str, num: int = 1) -> None:
        """Take back `num` units that a key holds."""
        self.used -= num
        held = self._held.pop(key, 0) - num
        if held:
            self._held[key] = held

    def held(self, key: str) -> int:
        """Return how many units a key holds."""
        return self._held.get(key, 0)


class Turns:
    """Places that are waited for, in turn: a key's queue makes no other key wait. Used from one event loop."""

    def __init__(self, num_places: int, most_of_one: int) -> None:
        """Let a key have at most `most_of_one` of the places at once."""
        self._num_places = num_places
        self._most_of_one = most_of_one
        self._taken: Counter[str] = Counter()
        # The first key is next.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, key: str) -> None:
        """Wait for a place until it is the key's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(key)
            raise

    def give_back(self, key: str) -> None:
        """Free a place that a key has taken."""
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        self._begin()

    def _begin(self) -> None:
        while self._taken.total() < self._num_places:
            key = next((name for name in self._waiting if self._taken[name] < self._most_of_one), None)
            if key is None:
                return
            queue = self._waiting.pop(key)
            turn = queue.popleft()
            if queue:
                self._waiting[key] = queue
            if not turn.done():
                self._taken[key] += 1
                turn.set_result(None)
