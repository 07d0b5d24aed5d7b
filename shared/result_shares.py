"""Shares the stream of results among tenants by bytes.

NATS drops the oldest messages of a full stream, regardless of tenant, and does not count bytes by tenant. So the
processes that store results count them: a ledger for each tenant, `hr.kept.<tenant>`, lists pieces of what the tenant
stored, each with its bytes and its last message number. Ledgers are updated by compare-and-set, once for each piece.
When the stream is nearly full, workers purge the oldest results of those tenants that hold more than their max-min fair
share. A tenant below it loses nothing. While there is room, nothing is purged.

A process that dies leaves at most one piece of each tenant uncounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import APIError

from shared.background_tasks import BackgroundTasks
from shared.bounds import Counter, UnixSeconds
from shared.errors import InvalidNameError
from shared.log_limit import LogLimit
from shared.nats_connection import SEND_ERRORS
from shared.publication import WRONG_LAST_SEQUENCE, last_message, publish_expecting
from shared.server_clock import ServerClock
from shared.streams import ENDS_STREAM, RESULTS_STREAM
from shared.subjects import decode_name, ends_filter, ledger_subject, results_filter

PURGE_INTERVAL_S = 10.0
# Shares count when a stream is this full; then it is brought down to the second fraction.
NEARLY_FULL = 0.75
_TARGET = 0.6
# A piece is this part of the stream, but not so small that ledgers are much of the written bytes; in a small stream it
# is a fraction of the room left when shares begin to count.
_PIECES = 256
_FIRST_PIECE_BYTES = 64 << 10
_FEWEST_PIECES = 16
_MAX_PIECES = 1024
# NATS's own bytes for each message, its headers included.
_MESSAGE_BYTES = 100
# After a ledger that could not be written, for instance for want of permission.
_PAUSE_S = 30.0
_NUM_TRIES = 10
_MAX_PAUSE_S = 0.1
_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


class Piece(Struct, frozen=True, array_like=True):
    """Results that one process stored for a tenant: number of the last, bytes of all, Unix seconds of the last."""

    last_seq: Counter
    num_bytes: Counter
    stored: UnixSeconds


@dataclass(slots=True)
class _Uncounted:
    last_seq: int = 0
    num_bytes: int = 0


class ResultShares:
    """Counts what tenants store and, in workers, purges what exceeds their shares when the stream is nearly full."""

    def __init__(self, js: JetStreamContext, *, can_purge: bool, clock: ServerClock) -> None:
        self.clock = clock
        self._js = js
        self._can_purge = can_purge
        self._uncounted: dict[str, _Uncounted] = {}
        self._piece_bytes = _FIRST_PIECE_BYTES
        self._decode = msgspec.msgpack.Decoder(list[Piece]).decode
        self._paused_until = 0.0
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._under_way: dict[str, int] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._purging = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._log_limit = LogLimit(_log)

    @contextlib.asynccontextmanager
    async def storing(self, tenant: str, num_bytes: int) -> AsyncIterator[list[int]]:
        """Wait until a tenant may store a result, and count it; the block appends its number in the stream, if any.

        A tenant stores no faster than its share can be kept: one piece at once, and none while a piece is entered.
        """
        num_bytes += _MESSAGE_BYTES
        while self._is_busy(tenant, num_bytes):
            await self._changed.setdefault(tenant, asyncio.Event()).wait()
        self._under_way[tenant] = self._under_way.get(tenant, 0) + num_bytes
        numbers: list[int] = []
        try:
            yield numbers
        finally:
            self._under_way[tenant] -= num_bytes
            if numbers:
                uncounted = self._note(tenant, numbers[0], num_bytes)
                is_due = uncounted.num_bytes >= self._piece_bytes and not self._is_paused
                if is_due and tenant not in self._settling:
                    self._settle_soon(tenant)
            self._wake(tenant)

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _is_busy(self, tenant: str, num_bytes: int) -> bool:
        if tenant in self._settling:
            return True
        under_way, uncounted = self._under_way.get(tenant, 0), self._uncounted.get(tenant, _Uncounted()).num_bytes
        return under_way > 0 and under_way + uncounted + num_bytes > self._piece_bytes and not self._is_paused

    def _wake(self, tenant: str) -> None:
        if not self._under_way.get(tenant):
            self._under_way.pop(tenant, None)
        if changed := self._changed.pop(tenant, None):
            changed.set()

    def _note(self, tenant: str, seq: int, num_bytes: int) -> _Uncounted:
        uncounted = self._uncounted.setdefault(tenant, _Uncounted())
        uncounted.last_seq = max(uncounted.last_seq, seq)
        uncounted.num_bytes += num_bytes
        return uncounted

    async def close(self) -> None:
        """Enter results that are not in the ledgers yet, and wait for running tasks."""
        await self._tasks.wait()
        for tenant in list(self._uncounted):
            self._settle_soon(tenant)
        await self._tasks.wait()

    async def purge(self) -> None:
        """Bring tenants down to their shares if the stream of results, or that of ends, is nearly full."""
        async with self._purging:
            await self._purge_full_streams()

    async def _purge_full_streams(self) -> None:
        results = await self._js.stream_info(RESULTS_STREAM)
        max_bytes = results.config.max_bytes or 0
        if max_bytes > 0:
            self._piece_bytes = min(max(_FIRST_PIECE_BYTES, max_bytes // _PIECES), max_bytes // _FEWEST_PIECES)
        if self._can_purge and _is_nearly_full(results):
            ledgers = await self._ledgers(results.config.max_age or 0.0)
            share = fair_share([_total(pieces) for pieces in ledgers.values()], int(max_bytes * _TARGET))
            for tenant, pieces in ledgers.items():
                await self._purge_results(tenant, pieces, share)
        ends = await self._js.stream_info(ENDS_STREAM)
        if self._can_purge and _is_nearly_full(ends):
            tenants = await self._tenants()
            # Ends are of about one size, so their number bounds their bytes.
            keep = int(ends.state.messages * _TARGET / NEARLY_FULL / max(1, len(tenants)))
            for tenant in tenants:
                await self._js.purge_stream(ENDS_STREAM, subject=ends_filter(tenant), keep=max(1, keep))

    def _settle_soon(self, tenant: str) -> None:
        settling = self._tasks.spawn(self._settle(tenant), f"ledger of {tenant}")
        self._settling[tenant] = settling

        def ended(_: object) -> None:
            del self._settling[tenant]
            self._wake(tenant)

        settling.add_done_callback(ended)

    async def _settle(self, tenant: str) -> None:
        uncounted = self._uncounted.pop(tenant, None)
        if uncounted is None:
            return
        try:
            await self._enter(tenant, Piece(uncounted.last_seq, uncounted.num_bytes, self.clock.now()))
        except _ERRORS as error:
            self._note(tenant, uncounted.last_seq, uncounted.num_bytes)
            self._paused_until = time.monotonic() + _PAUSE_S
            self._log_limit.warning(tenant, "stored results not counted yet: %r", error)
            return
        try:
            await self.purge()
        except _ERRORS as error:
            self._log_limit.warning("purge", "the stream of results could not be shared among tenants: %r", error)

    async def _enter(self, tenant: str, piece: Piece) -> None:
        """Add a piece to a tenant's ledger, again if another process writes it at the same time."""
        for _ in range(_NUM_TRIES):
            pieces, revision = await self._ledger(tenant)
            if await self._write(tenant, sorted([*pieces, piece], key=lambda piece: piece.last_seq), revision):
                return
            await asyncio.sleep(random.uniform(0, _MAX_PAUSE_S))
        raise APIError(err_code=WRONG_LAST_SEQUENCE, description=f"other processes were faster {_NUM_TRIES} times")

    async def _ledgers(self, max_age_s: float) -> dict[str, list[Piece]]:
        """Return the non-empty ledgers of all tenants, without pieces that are too old to be in the stream."""
        oldest = self.clock.now() - max_age_s if max_age_s else 0.0
        ledgers = {}
        for tenant in await self._tenants():
            if pieces := [piece for piece in (await self._ledger(tenant))[0] if piece.stored >= oldest]:
                ledgers[tenant] = pieces
        return ledgers

    async def _tenants(self) -> list[str]:
        info = await self._js.stream_info(ENDS_STREAM, subjects_filter="hr.kept.*")
        tenants = []
        for subject in info.state.subjects or {}:
            with contextlib.suppress(InvalidNameError):
                tenants.append(decode_name(subject.rpartition(".")[2]))
        return tenants

    async def _ledger(self, tenant: str) -> tuple[list[Piece], int]:
        """Return a ledger and its revision. No piece is younger than NATS's time of the ledger: later times are cut."""
        message = await last_message(self._js, ENDS_STREAM, ledger_subject(tenant))
        if message is None:
            return [], 0
        assert message.time is not None
        written = message.time.timestamp()
        try:
            pieces = self._decode(message.data or b"")
        except msgspec.MsgspecError as error:
            self._log_limit.warning(tenant, "the ledger of a tenant's results cannot be read: %s", error)
            return [], message.seq or 0
        return [replace(piece, stored=min(piece.stored, written)) for piece in pieces], message.seq or 0

    async def _write(self, tenant: str, pieces: list[Piece], revision: int) -> bool:
        """Replace a ledger; False if another process has just written it."""
        payload = msgspec.msgpack.encode(pieces[-_MAX_PIECES:])
        return await publish_expecting(self._js, ledger_subject(tenant), payload, revision) is not None

    async def _purge_results(self, tenant: str, pieces: list[Piece], share: int) -> None:
        total, num_dropped = _total(pieces), 0
        while total > share and num_dropped < len(pieces):
            total -= pieces[num_dropped].num_bytes
            num_dropped += 1
        if not num_dropped:
            return
        last_seq = pieces[num_dropped - 1].last_seq
        await self._js.purge_stream(RESULTS_STREAM, subject=results_filter(tenant), seq=last_seq + 1)
        current, revision = await self._ledger(tenant)
        # Where another process was faster, the next purge repeats this.
        await self._write(tenant, [piece for piece in current if piece.last_seq > last_seq], revision)
        self._log_limit.warning(
            tenant,
            "the stream of results is nearly full: the oldest of tenant %r, which holds more than its share of %d "
            "bytes, were dropped",
            tenant,
            share,
        )


def fair_share(totals: list[int], available: int) -> int:
    """Return the max-min fair share: what each may hold so that all together hold at most `available`."""
    share = 0
    for position, total in enumerate(sorted(totals)):
        share = available // (len(totals) - position)
        if total > share:
            return share
        available -= total
    return max([share, *totals])


def _total(pieces: list[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def _is_nearly_full(info: StreamInfo) -> bool:
    max_bytes = info.config.max_bytes or 0
    return max_bytes > 0 and info.state.bytes > NEARLY_FULL * max_bytes
