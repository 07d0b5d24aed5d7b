"""Keeps the table of aliases in NATS, where all gateways see its changes, and adds up what they count of canaries.

The table is the last message of `hr.alias` (stream `HR_ALIASES`), replaced by compare-and-set. NATS tells every gateway
of a new table on `hr.aliased`; besides, each reads it every few seconds. Each gateway process keeps its own counts of a
canary in `hr.canary.<canary>.<gateway>`, so they outlive it; every process adds up all of them, and judges.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import RawStreamMsg
from nats.js.errors import NotFoundError

from gateway.aliases.book import AliasBook
from gateway.aliases.comparison import BothArms, look_of, reason_to_roll_back
from gateway.aliases.table import Alias, AliasTable, Canary, Change, end_canary
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from shared.audit import audited
from shared.dependency_wait import wait_for
from shared.direct_client import DirectClient
from shared.errors import ConfigError, DependencyError
from shared.log_limit import LogLimit
from shared.messages import UNDECODABLE, encode
from shared.publication import messages_after, publish_expecting
from shared.streams import ALIASES_STREAM, StreamLimits, ensure_stream
from shared.subjects import ALIAS_CHANGED, ALIASES, canary_subject

SYNC_INTERVAL_S = 1.0
RETRY_S = 10.0
LOG_S = 600.0
COUNTS_KEPT_S = 30 * 86400
_ATTEMPTS = 8
# Answers that ran when their canary ended are counted that long.
_LAST_ANSWERS_S = 600.0
# Of a message's headers.
_MARGIN_BYTES = 1024
# NATS's code for a stream that it does not have.
_NO_STREAM = 10059
_FAILURES = (NatsError, OSError, TimeoutError, DependencyError)

_log = logging.getLogger(__name__)


class AliasStore:
    """Reads and changes the table, and judges canaries."""

    def __init__(
        self, nats: DirectClient, gateway: str, book: AliasBook, metrics: GatewayMetrics, audit_file: Path | None
    ) -> None:
        self._nats = nats
        self._js = nats.jetstream()
        self._gateway = gateway
        self._book = book
        book.told = metrics.canary_requests
        self._metrics = metrics
        self._audit_file = audit_file
        self._log_limit = LogLimit(_log)
        self._changed = asyncio.Event()
        # Reading and replacing the table is one step.
        self._lock = asyncio.Lock()
        # The table as it was read last: its sequence, 0 for none, and its bytes.
        self._seq, self._stored = 0, b""
        # By canary: counts of other processes, by subject; the last sequence number read; the last message sent.
        self._others: dict[str, dict[str, BothArms]] = {}
        self._read_to: dict[str, int] = {}
        self._sent: dict[str, bytes] = {}
        self._looks: dict[str, int] = {}

    async def start(self) -> None:
        """Hear of changes from now on, and read the table if NATS has it."""
        await self._nats.subscribe(ALIAS_CHANGED, cb=self._hear)
        # `watch_forever` logs the error and tries again.
        with suppress(*_FAILURES, *UNDECODABLE):
            await self._read()

    async def watch_forever(self) -> None:
        """Keep the table current, and canaries judged."""
        await wait_for(
            "the stream of aliases", partial(ensure_stream, self._js, ALIASES_STREAM, StreamLimits()), RETRY_S, LOG_S
        )
        while True:
            try:
                await self.sync()
            except (*_FAILURES, ApiError) as error:
                self._log_limit.warning("aliases", "aliases and canaries are not current: %r", error)
            except UNDECODABLE as error:
                self._log_limit.warning("table", "the table of aliases cannot be read: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), SYNC_INTERVAL_S)
            self._changed.clear()

    async def sync(self) -> None:
        """Read the table, exchange counts, and roll back worse canaries; `nats.errors.Error` if NATS is away."""
        async with self._lock:
            await self._read()
        for alias in self._book.table.aliases:
            last = alias.canary
            # Ended ones, too, while gateways may have counted more than this one knows.
            if last is not None and (
                last.ended is None or last.id not in self._others or time.time() - last.ended < _LAST_ANSWERS_S
            ):
                await self._exchange(last)
            if alias.running is not None:
                await self._judge(alias, alias.running)
        known = {alias.canary.id for alias in self._book.table.aliases if alias.canary is not None}
        for each in (self._others, self._read_to, self._sent, self._looks):
            for canary in each.keys() - known:
                del each[canary]

    async def change(self, change: Change) -> AliasTable:
        """Change the table, known elsewhere within a second; `ApiError` for a refusal, 503 if NATS is away."""
        try:
            for _ in range(_ATTEMPTS):
                async with self._lock:
                    changed = change(await self._read())
                    payload = encode(changed)
                    self._check_size(payload)
                    seq = await publish_expecting(self._js, ALIASES, payload, self._seq)
                    if seq is not None:
                        self._take(seq, payload)
                        return changed
        except UNDECODABLE as error:
            message = "The table of aliases in NATS cannot be read by this version, so it is not changed."
            raise ApiError(503, message, code="aliases_unavailable", retry_after_s=60.0) from error
        except _FAILURES as error:
            message = "The table of aliases cannot be changed: NATS is away, or `headrace setup` has not been run."
            raise ApiError(503, message, code="aliases_unavailable", retry_after_s=5.0) from error
        message = "Others are changing aliases at the same time. Try again."
        raise ApiError(503, message, code="aliases_unavailable", retry_after_s=1.0)

    def counts(self, canary: str) -> BothArms:
        """Return what all processes have counted of a canary, as far as this one knows."""
        total = BothArms()
        for each in (self._book.own.get(canary, BothArms()), *self._others.get(canary, {}).values()):
            total.merge(each)
        return total

    def _check_size(self, payload: bytes) -> None:
        most = self._nats.max_payload - _MARGIN_BYTES
        if len(payload) > most:
            message = f"The table of aliases would have {len(payload)} bytes, and NATS takes {most}: remove some first."
            raise ApiError(400, message, code="invalid_value")

    async def _hear(self, message: Msg) -> None:
        self._changed.set()

    async def _read(self) -> AliasTable:
        """Take the table as NATS has it. If NATS has lost the stream, make it and the table again."""
        message = await self._last()
        if message is None and self._seq:
            await publish_expecting(self._js, ALIASES, self._stored, 0)
            message = await self._last()
        if message is not None and message.seq is not None:
            self._take(message.seq, message.data or b"")
        return self._book.table

    async def _last(self) -> RawStreamMsg | None:
        try:
            return await self._js.get_last_msg(ALIASES_STREAM, ALIASES)
        except NotFoundError as error:
            if error.err_code == _NO_STREAM:
                await ensure_stream(self._js, ALIASES_STREAM, StreamLimits())
            return None

    def _take(self, seq: int, payload: bytes) -> None:
        if (seq, payload) == (self._seq, self._stored):
            return
        if seq < self._seq:
            # The stream is a new one: it has no counts, and its sequences begin again.
            self._sent.clear()
            self._read_to.clear()
        self._book.take(msgspec.msgpack.decode(payload, type=AliasTable))
        self._seq, self._stored = seq, payload

    async def _exchange(self, canary: Canary) -> None:
        own = self._book.own.get(canary.id)
        payload = None if own is None else encode(own)
        if payload is not None and payload != self._sent.get(canary.id):
            subject = canary_subject(canary.id, self._gateway)
            await self._js.publish(subject, payload, headers={"Nats-TTL": f"{COUNTS_KEPT_S}s"})
            self._sent[canary.id] = payload
        others, read_to = self._others.setdefault(canary.id, {}), self._read_to.get(canary.id, 0)
        subject = canary_subject(canary.id, "*")
        async for seq, message in messages_after(self._js, ALIASES_STREAM, subject, read_to):
            self._read_to[canary.id] = seq
            if message.subject != canary_subject(canary.id, self._gateway):
                with suppress(*UNDECODABLE):
                    others[message.subject or ""] = msgspec.msgpack.decode(message.data or b"", type=BothArms)

    async def _judge(self, alias: Alias, canary: Canary) -> None:
        arms = self.counts(canary.id)
        look = look_of(arms.canary.requests, canary.rules)
        if look is None or look <= self._looks.get(canary.id, -1):
            return
        worse = reason_to_roll_back(arms, canary.rules, look)
        if worse is not None:
            await self._roll_back(alias, canary, *worse)
        # Not before: if NATS did not take the rollback, the next round tries again.
        self._looks[canary.id] = look

    async def _roll_back(self, alias: Alias, canary: Canary, word: str, reason: str) -> None:
        def end(table: AliasTable) -> AliasTable:
            return end_canary(table, alias.name, alias.tenant, "rolled_back", reason, time.time(), canary.id)

        try:
            await self.change(end)
        except ApiError as error:
            if error.status != 404:
                raise
            # Another process was first, or an operator.
            return
        self._metrics.canary_rollbacks[word] += 1
        fields = {"alias": alias.name, "tenant": alias.tenant, "canary": canary.model, "reason": reason}
        _log.warning("canary rolled back", extra=fields)
        try:
            if self._audit_file is not None:
                with audited(self._audit_file, "canary.rollback", by="comparison", **fields):
                    pass
        except ConfigError as error:
            # Unlike an operator's change it has been made: a worse model does not stay for want of a log.
            _log.warning("the rollback is not in the audit log: %s", error)
