"""The load generator: closed-loop clients that ask one request after the other, over all gateways in turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ops.chaos.ledger import Entry, Ledger, Verdict
from ops.chaos.mix import Body
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, System

ANSWER_TIMEOUT_S = 40.0
_ENDLESS = 1_000_000
_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_LAG_TICK_S = 0.05
_NUM_REFERENCES_AT_ONCE = 40
_NUM_REFERENCE_TRIES = 11


@dataclass(kw_only=True, eq=False)
class Load:
    """Owns a ledger and the clients that write it, which ask `bodies` in turn of `gateways`, or of all that run.

    Attributes:
        timeout_s: A request that takes longer counts as never ended.
        pause_s: Wait of a refused client; by default its `Retry-After`, at most a second.
        max_lag_s: Longest stall of this process itself: shorter silences prove nothing.
        num_left: Requests that `run` has still to send.
    """

    system: System = field(kw_only=False)
    bodies: Sequence[Body] = field(kw_only=False)
    key: str = API_KEY
    timeout_s: float = ANSWER_TIMEOUT_S
    pause_s: float | None = None
    gateways: Sequence[str] | None = None
    ledger: Ledger = field(default_factory=Ledger)
    max_lag_s: float = field(default=0.0, init=False)
    num_left: int = field(default=0, init=False)
    _turns: Iterator[int] = field(default_factory=itertools.count, init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def fresh(self) -> Load:
        """Return a load of the same bodies, key and references, with a ledger of its own."""
        return replace(self, ledger=Ledger(references=self.ledger.references))

    async def learn_references(self) -> None:
        """Ask each body once, undisturbed, and keep its answer as what all others must be.

        Raises:
            RuntimeError: One of them was not answered.
        """
        gateway = self.system.gateways[0].name
        for start in range(0, len(self.bodies), _NUM_REFERENCES_AT_ONCE):
            numbers = range(start, min(start + _NUM_REFERENCES_AT_ONCE, len(self.bodies)))
            entries = await asyncio.gather(*(self._ask_undisturbed(number, gateway) for number in numbers))
            for number, entry in zip(numbers, entries, strict=True):
                verdict = entry.judge(None)
                if verdict is not Verdict.OK:
                    raise RuntimeError(f"undisturbed request {number} is {verdict.value}: {entry.status} {entry.error}")
                self.ledger.references[number] = entry.answer

    async def run(self, num_requests: int, concurrency: int) -> None:
        """Send `num_requests`, `concurrency` at a time; return when the last has ended, or after `stop`."""
        self.num_left = num_requests
        async with self._lag_measured(), asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(self._repeat())

    @contextlib.asynccontextmanager
    async def going_on(self, concurrency: int) -> AsyncIterator[None]:
        """Ask without end, `concurrency` at once, while the block runs; then wait for the requests under way."""
        asking = asyncio.create_task(self.run(_ENDLESS, concurrency))
        try:
            yield
            self.stop()
            await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def run_open(self, rate_per_s: float, span_s: float) -> None:
        """Ask at a fixed rate for a span of time, whether answers come or not, and return when all have ended."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._lag_measured(), asyncio.TaskGroup() as clients:
            for number in range(int(rate_per_s * span_s)):
                await asyncio.sleep(max(0.0, began + number / rate_per_s - loop.time()))
                if self._stopping.is_set():
                    return
                clients.create_task(self._ask(number % len(self.bodies), self._gateway(number)))

    def stop(self) -> None:
        """Let the clients end after the request that they are at."""
        self._stopping.set()

    async def ask_once(self, body: int = 0, gateway: str | None = None) -> Verdict:
        """Ask one ordinary request and judge it; it is not in the ledger."""
        entry = await self._ask(body, gateway or self.system.gateways[0].name, is_reference=True)
        return self.ledger.verdict(entry)

    async def _repeat(self) -> None:
        while self.num_left > 0 and not self._stopping.is_set():
            self.num_left -= 1
            turn = next(self._turns)
            entry = await self._ask(turn % len(self.bodies), self._gateway(turn))
            if entry.status != 200 and not entry.is_aborted:
                told_s = max(_PAUSE_S, min(entry.retry_after_s or 0.0, _MAX_PAUSE_S))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self.pause_s or told_s)

    def _gateway(self, turn: int) -> str:
        """Return the gateway whose turn it is; dead ones are passed over, as a load balancer would."""
        names = self.gateways or [part.name for part in self.system.gateways]
        alive = [name for name in names if self.system.part(name).is_running] or names
        return alive[turn % len(alive)]

    async def _ask_undisturbed(self, number: int, gateway: str) -> Entry:
        """Ask for a reference, again where it is refused: grammars are checked one after the other."""
        for _ in range(_NUM_REFERENCE_TRIES):
            entry = await self._ask(number, gateway, is_reference=True)
            if entry.judge(None) is not Verdict.REFUSED:
                break
            await asyncio.sleep(entry.retry_after_s or 0.0)
        return entry

    async def _ask(self, number: int, gateway: str, *, is_reference: bool = False) -> Entry:
        entry = Entry(number, gateway, time.monotonic(), self.bodies[number].is_stream)
        if not is_reference:
            self.ledger.entries.append(entry)
        part = self.system.part(gateway)
        num_kills = part.num_kills
        await ask(self.bodies[number], self.system.port(gateway), self.key, entry, self.timeout_s)
        entry.is_gateway_killed = part.num_kills > num_kills or not part.is_running
        return entry

    @contextlib.asynccontextmanager
    async def _lag_measured(self) -> AsyncIterator[None]:
        async def measure() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(_LAG_TICK_S)
                self.max_lag_s = max(self.max_lag_s, time.monotonic() - before - _LAG_TICK_S)

        measuring = asyncio.create_task(measure())
        try:
            yield
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
