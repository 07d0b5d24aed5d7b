"""Checks untrusted grammars in another process, so that none can harm this one.

Verdicts are kept, so that a schema that a client sends with every request is checked once. The grammars of one tenant
are checked one after the other, and wait for each other. A check goes on after the longest wait, and the client is
asked to come back: then its verdict is there. Of the places in which grammars are checked, all tenants share one whose
last grammar took long or that have spent much time lately, so that the others always have one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import time
from collections import OrderedDict

import msgspec

from shared.background_tasks import BackgroundTasks
from shared.grammar.checker_process import NICENESS, NICENESS_OF_LONG_ONES, TIME_LIMIT_S, Verdict
from shared.grammar.grammar import Grammar, GrammarError, LlguidanceMissingError
from shared.limited_link import LimitedLink, LimitedProcessError

PROCESS = "the process that checks grammars"

TIMEOUT_S = 10.0
"""Longest wait for a verdict, behind the other grammars of the tenant."""

MAX_VERDICTS_PER_TENANT = 256
MAX_TENANTS = 256
MAX_WAITING_PER_TENANT = 128
MAX_WAITING_BYTES = 64 << 20
MAX_CHECKED_AT_ONCE = 2

LONG_S = 0.03
"""Processor time from which a grammar counts as one that takes long. Usual ones take 10 ms."""

MAX_SPENT_S = 0.2
SPENT_FORGOTTEN = 0.05
"""A tenant that has lately spent more processor time counts as one too; so much of it is forgotten in each second."""


class CheckerBusyError(Exception):
    """There is no verdict in time, but about `retry_after_s` later; `is_own`: it waits for others of its tenant."""

    def __init__(self, *, is_own: bool, retry_after_s: float) -> None:
        super().__init__()
        self.is_own = is_own
        self.retry_after_s = retry_after_s


class GrammarChecker:
    """Asks a process of its own about grammars, which starts with the first one."""

    def __init__(self, link: LimitedLink | None = None) -> None:
        self._link = link or LimitedLink("shared.grammar.checker_process", TIME_LIMIT_S, PROCESS)
        self._waiting_bytes = 0
        self._places = asyncio.Semaphore(MAX_CHECKED_AT_ONCE)
        self._place_of_long_ones = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    async def close(self) -> None:
        """End the process; what still waits fails."""
        for own in self._tenants.values():
            for task in own.waiting.values():
                task.cancel()
        await self._link.close()
        await self._tasks.wait()

    async def start(self) -> None:
        """Start the process ahead of the first grammar; `LimitedProcessError` if it does not."""
        await self._link.start()

    async def check(self, tenant: str, grammar: Grammar, within_s: float = TIMEOUT_S) -> None:
        """Refuse a grammar that no worker could obey exactly.

        Args:
            tenant: Whose it is.
            grammar: What to check.
            within_s: How long to wait for the verdict, once the process has started.

        Raises:
            GrammarError: It is refused.
            CheckerBusyError: There is no verdict in this time, or the tenant has too many grammars waiting.
            LimitedProcessError: The process does not answer.
            LlguidanceMissingError: The package is not installed.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise LlguidanceMissingError
        message = msgspec.msgpack.encode(grammar)
        digest = hashlib.sha256(message).digest()
        own = self._tenant(tenant)
        verdict = own.verdict(digest)
        if verdict is None:
            await self._link.start()
            # Meanwhile other tenants may have taken its place.
            own = self._tenant(tenant)
            # Those who ask about the same grammar wait together, and none who goes away breaks off the check.
            task = own.waiting.get(digest) or self._begin(own, digest, message)
            if not (await asyncio.wait({task}, timeout=within_s))[0]:
                raise own.busy(is_own=next(iter(own.waiting)) != digest)
            if task.cancelled():
                raise LimitedProcessError
            found = task.result()
            if isinstance(found, LimitedProcessError):
                raise found
            verdict = found
        if verdict.reason:
            raise GrammarError(verdict.reason, verdict.path)

    def _tenant(self, name: str) -> _Tenant:
        own = self._tenants.get(name)
        if own is None:
            own = self._tenants[name] = _Tenant()
        self._tenants.move_to_end(name)
        for other in list(self._tenants)[: max(0, len(self._tenants) - MAX_TENANTS)]:
            if not self._tenants[other].waiting:
                del self._tenants[other]
        return own

    def _begin(self, own: _Tenant, digest: bytes, message: bytes) -> asyncio.Task[Verdict | LimitedProcessError]:
        if len(own.waiting) >= MAX_WAITING_PER_TENANT:
            raise own.busy(is_own=True)
        if self._waiting_bytes + len(message) > MAX_WAITING_BYTES:
            raise own.busy(is_own=False)
        self._waiting_bytes += len(message)
        task = self._tasks.spawn(self._find_verdict(own, digest, message))
        own.waiting[digest] = task
        return task

    async def _find_verdict(self, own: _Tenant, digest: bytes, message: bytes) -> Verdict | LimitedProcessError:
        """Return the verdict, or the error for those who wait: raised here, it would be logged as a defect."""
        try:
            async with (
                own.turn,
                self._place_of_long_ones if own.takes_long else contextlib.nullcontext(),
                self._places,
            ):
                began = time.monotonic()
                niceness = NICENESS_OF_LONG_ONES if own.takes_long else NICENESS
                verdict = Verdict.of(await self._link.ask(message, niceness))
            own.seconds_a_check = time.monotonic() - began
            own.spend(verdict.cpu_s)
            own.keep(digest, verdict)
            return verdict
        except LimitedProcessError as error:
            return error
        finally:
            self._waiting_bytes -= len(message)
            del own.waiting[digest]


class _Tenant:
    """The verdicts on one tenant's grammars, and its turns: one grammar of a tenant is checked at a time."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting: dict[bytes, asyncio.Task[Verdict | LimitedProcessError]] = {}
        self.seconds_a_check = 0.0
        self._last_s = self._spent_s = self._spent_at = 0.0
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    @property
    def takes_long(self) -> bool:
        """Whether its last grammar took long, or those of late together: short ones between long ones hide nothing."""
        return self._last_s > LONG_S or self._spent_lately(time.monotonic()) > MAX_SPENT_S

    def spend(self, cpu_s: float) -> None:
        now = time.monotonic()
        self._last_s, self._spent_s, self._spent_at = cpu_s, self._spent_lately(now) + cpu_s, now

    def _spent_lately(self, now: float) -> float:
        return max(0.0, self._spent_s - SPENT_FORGOTTEN * (now - self._spent_at))

    def verdict(self, digest: bytes) -> Verdict | None:
        verdict = self._verdicts.get(digest)
        if verdict is not None:
            self._verdicts.move_to_end(digest)
        return verdict

    def keep(self, digest: bytes, verdict: Verdict) -> None:
        self._verdicts[digest] = verdict
        if len(self._verdicts) > MAX_VERDICTS_PER_TENANT:
            self._verdicts.popitem(last=False)

    def busy(self, *, is_own: bool) -> CheckerBusyError:
        return CheckerBusyError(is_own=is_own, retry_after_s=max(1.0, len(self.waiting) * self.seconds_a_check))
