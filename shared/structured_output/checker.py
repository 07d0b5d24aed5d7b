"""Checks grammars of strangers without harm to this process: in another one, one after the other, tenant by tenant.

Verdicts are kept, so that a schema that a client sends with every request is checked once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import sys
from collections import OrderedDict

import msgspec

from shared.background_tasks import BackgroundTasks
from shared.sampling import Grammar
from shared.structured_output.checker_process import LENGTH, TIME_LIMIT_S, Verdict
from shared.structured_output.errors import GrammarError, LlguidanceMissingError

MAX_VERDICTS_PER_TENANT = 256
MAX_TENANTS = 256
MAX_WAITING_PER_TENANT = 64
# Beyond the limit that the process itself keeps.
ANSWER_TIMEOUT_S = TIME_LIMIT_S + 5.0

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG")

_logger = logging.getLogger(__name__)


class CheckerBusyError(Exception):
    """A tenant has too many grammars waiting to be checked."""


class CheckerFailedError(Exception):
    """The process that checks grammars does not answer."""


class GrammarChecker:
    """Asks a process of its own about grammars. The process starts with the first one, and again if it has died."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: asyncio.subprocess.Process | None = None
        self._is_closed = False
        self._one_at_a_time = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    async def close(self) -> None:
        """End the process; what still waits fails."""
        self._is_closed = True
        await self._end_process()
        await self._tasks.wait()

    async def check(self, tenant: str, grammar: Grammar) -> None:
        """Refuse a grammar that no worker could obey exactly.

        Raises:
            GrammarError: It is refused.
            CheckerBusyError: The tenant has `MAX_WAITING_PER_TENANT` other grammars waiting.
            CheckerFailedError: The process does not answer.
            LlguidanceMissingError: The package is not installed.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise LlguidanceMissingError
        message = msgspec.msgpack.encode(grammar)
        digest = hashlib.sha256(message).digest()
        own = self._tenant(tenant)
        verdict = own.verdict(digest)
        if verdict is None:
            # Those who ask about the same grammar wait together, and none who goes away breaks off the exchange.
            verdict = await asyncio.shield(own.waiting.get(digest) or self._begin(own, digest, message))
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

    def _begin(self, own: _Tenant, digest: bytes, message: bytes) -> asyncio.Task[Verdict]:
        if len(own.waiting) >= MAX_WAITING_PER_TENANT:
            raise CheckerBusyError
        task = self._tasks.spawn(self._find_verdict(own, digest, message))
        own.waiting[digest] = task
        return task

    async def _find_verdict(self, own: _Tenant, digest: bytes, message: bytes) -> Verdict:
        try:
            async with own.turn:
                verdict = await self._ask(message)
            own.keep(digest, verdict)
            return verdict
        finally:
            del own.waiting[digest]

    async def _ask(self, message: bytes) -> Verdict:
        """Return the verdict. The process may have died since the last grammar: then it is started once more."""
        async with self._one_at_a_time:
            for _ in range(2):
                try:
                    async with asyncio.timeout(ANSWER_TIMEOUT_S):
                        return await self._exchange(message)
                except (OSError, EOFError, TimeoutError):
                    _logger.warning("the process that checks grammars does not answer", exc_info=True)
                    # An answer that is still to come would be taken for the next one's.
                    await self._end_process()
        raise CheckerFailedError

    async def _exchange(self, message: bytes) -> Verdict:
        process = await self._started_process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LENGTH.pack(len(message)) + message)
        await process.stdin.drain()
        head = await process.stdout.readexactly(LENGTH.size)
        answer = await process.stdout.readexactly(LENGTH.unpack(head)[0])
        return msgspec.msgpack.decode(answer, type=Verdict)

    async def _started_process(self) -> asyncio.subprocess.Process:
        if self._is_closed:
            raise CheckerFailedError
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "shared.structured_output.checker_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # llguidance writes parts of grammars there.
                stderr=asyncio.subprocess.DEVNULL,
                env=_environment(),
            )
        return self._process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _Tenant:
    """The verdicts on one tenant's grammars, and its turns: one grammar of a tenant is checked at a time."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting: dict[bytes, asyncio.Task[Verdict]] = {}
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def verdict(self, digest: bytes) -> Verdict | None:
        verdict = self._verdicts.get(digest)
        if verdict is not None:
            self._verdicts.move_to_end(digest)
        return verdict

    def keep(self, digest: bytes, verdict: Verdict) -> None:
        self._verdicts[digest] = verdict
        if len(self._verdicts) > MAX_VERDICTS_PER_TENANT:
            self._verdicts.popitem(last=False)


def _environment() -> dict[str, str]:
    """Return the variables of the process: no secret of this one, and where its modules are."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
