"""What each tenant has had of each model, by lane: counted by gateways and workers, added up by NATS, kept for good.

The stream `HR_USAGE` is one of counters: a message names a change, NATS adds it to the total of its subject. So totals
outlive every process. Gateways count answers over HTTP, workers jobs of the batch lane. A process that is killed loses
what it has counted in the last `FLUSH_S`.

The changes of one model are published together with a change of the sender's own counter, its receipt, and NATS takes
all of them or none. So a process that got no acknowledgement asks its receipt whether they were taken, however long
the outage was and however many others count the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, get_args

from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from shared.errors import InvalidNameError
from shared.log_limit import LogLimit
from shared.messages import Lane
from shared.nats_connection import SEND_ERRORS
from shared.receipt import Receipt
from shared.streams import USAGE_STREAM
from shared.subjects import decode_name, encode_name, usage_subject

FLUSH_S = 5.0
# After NATS refused a change: the stream may be missing.
_PAUSE_S = 30.0
# Of one publication; NATS takes a thousand messages.
_MAX_CHANGES = 500
# `headrace setup` deletes receipts that have not changed for so long; a process begins a new one much earlier.
_RECEIPT_KEPT_S = 30 * 86400.0
_RECEIPT_USED_S = 86400.0
Measure = Literal["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "device_us", "energy_mj"]
"""`device_us` are microseconds of devices, `energy_mj` their millijoules. Each measure has a counter for all time, and
one for each day of UTC, which `headrace setup` deletes after `DAYS_KEPT`."""
MEASURES: tuple[Measure, ...] = get_args(Measure)
DAYS_KEPT = 400
_DAY_S = 86400
_RECEIPTS = "receipts"

_REFUSALS: tuple[type[Exception], ...] = (APIError, NoStreamResponseError)
_NO_MORE = 10037
_TAKEN_BEFORE = 10201

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Account:
    """What was counted of one model.

    Attributes:
        model: Its name.
        lane: Of what is counted.
        receipt: Subject of a counter that this process alone changes, by 1 with each publication.
        rows: By tenant and day, what was counted since it was last sent.
        counted: By subject, what has not been sent.
        sending: By subject, what was sent and is not known to be taken.
        is_doubtful: Whether NATS may have taken `sending`.
        num_taken: How many publications NATS has taken.
        taken_at: Monotonic seconds of the last one.
    """

    model: str
    lane: Lane
    receipt: str
    rows: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)
    sending: dict[str, int] = field(default_factory=dict)
    is_doubtful: bool = False
    num_taken: int = 0
    taken_at: float = field(default_factory=time.monotonic)

    def prepare(self) -> None:
        """Choose what is sent next; what is being sent stays so until NATS has taken it."""
        rows, self.rows = self.rows, {}
        for (tenant, day), counts in rows.items():
            for measure, count in zip(MEASURES, counts, strict=True):
                if count:
                    self.counted[usage_subject(tenant, self.model, self.lane, measure)] += count
                    self.counted[usage_subject(tenant, self.model, self.lane, f"{measure}-{day}")] += count
        if not self.sending:
            self.sending = dict(list(self.counted.items())[:_MAX_CHANGES])
            for subject in self.sending:
                del self.counted[subject]

    def settle(self) -> None:
        self.sending, self.is_doubtful = {}, False
        self.num_taken += 1
        self.taken_at = time.monotonic()


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """One total."""

    tenant: str
    model: str
    lane: str
    measure: str
    total: int


class UsageLedger:
    """Counts in memory, and sends what has been counted. The counts are written by the event loop's thread alone."""

    def __init__(self, lane: Lane, clock: Callable[[], float] = time.time) -> None:
        """Count answers of a lane; nothing is sent before `flush`. Days are those of `clock`, in Unix seconds."""
        self._clock = clock
        self._day, self._day_began = "", -math.inf
        self._lane: Lane = lane
        self._accounts: dict[str, _Account] = {}
        self._paused_until = 0.0
        self._is_flushing = asyncio.Lock()
        self._log_limit = LogLimit(_log)

    def add(self, tenant: str, model: str, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Count an answer."""
        counts = self._counts(tenant, model)
        counts[0] += 1
        counts[1] += prompt_tokens
        counts[2] += cached_tokens
        counts[3] += completion_tokens

    def add_time(self, tenant: str, model: str, receipt: Receipt) -> None:
        """Count what an attempt has taken of the device."""
        counts = self._counts(tenant, model)
        counts[4] += round(receipt.device_s * 1e6)
        if receipt.energy_j is not None:
            counts[5] += round(receipt.energy_j * 1e3)

    def _counts(self, tenant: str, model: str) -> list[int]:
        """Return what is counted of a tenant and model today, in the order of `MEASURES`. Once a request or twice."""
        now = self._clock()
        if not 0.0 <= now - self._day_began < _DAY_S:
            self._day, self._day_began = day_of(now), now // _DAY_S * _DAY_S
        rows, key = self._account(model).rows, (tenant, self._day)
        counts = rows.get(key)
        if counts is None:
            counts = rows[key] = [0] * len(MEASURES)
        return counts

    def _account(self, model: str) -> _Account:
        account = self._accounts.get(model)
        if account is None or self._is_outlived(account):
            receipt = usage_subject(secrets.token_hex(8), model, self._lane, _RECEIPTS)
            account = self._accounts[model] = _Account(model, self._lane, receipt)
        return account

    def _is_outlived(self, account: _Account) -> bool:
        is_idle = not (account.sending or account.counted or account.rows)
        return is_idle and time.monotonic() - account.taken_at > _RECEIPT_USED_S

    async def flush(self, js: JetStreamContext, *, is_last: bool = False) -> None:
        """Send what has been counted; what NATS does not take is sent again, and counts once.

        Args:
            js: Where to send.
            is_last: The process ends: try whatever NATS said before.
        """
        if time.monotonic() < self._paused_until and not is_last:
            return
        async with self._is_flushing:
            try:
                for account in list(self._accounts.values()):
                    await self._send(js, account)
            except _REFUSALS as error:
                self._paused_until = time.monotonic() + _PAUSE_S
                told = "usage of tenants is not kept (%r): run `headrace setup`, and check NATS's permissions"
                self._log_limit.warning("usage", told, error)
            except SEND_ERRORS as error:
                # NATS does not answer a change that it does not permit either.
                told = "usage of tenants is not kept yet (%r), it is sent again; or NATS's permissions are missing"
                self._log_limit.warning("unanswered", told, error)

    async def _send(self, js: JetStreamContext, account: _Account) -> None:
        while account.sending or account.counted or account.rows:
            account.prepare()
            if not (account.is_doubtful and await _was_taken(js, account)):
                account.is_doubtful = True
                await _publish(js, account)
            account.settle()

    async def flush_forever(self, js: JetStreamContext) -> None:
        """Send every few seconds."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush(js)


async def _was_taken(js: JetStreamContext, account: _Account) -> bool:
    """Ask NATS for the receipt's total, by a change of nothing: reading the stream would take a permission."""
    receipt = await js.publish(account.receipt, b"", headers={"Nats-Incr": "+0"})
    return int(receipt.val or 0) > account.num_taken


async def _publish(js: JetStreamContext, account: _Account) -> None:
    """Publish changes and their receipt so that NATS takes all or none.

    Raises:
        nats.errors.Error: NATS refuses or does not answer.
    """
    publication = {"Nats-Batch-Id": secrets.token_hex(16)}
    for number, (subject, count) in enumerate(account.sending.items(), start=1):
        change = {"Nats-Incr": f"+{count}", "Nats-Batch-Sequence": str(number)}
        await js._nc.publish(subject, b"", headers=publication | change)
    receipt = {
        "Nats-Incr": "+1",
        "Nats-Batch-Sequence": str(len(account.sending) + 1),
        "Nats-Batch-Commit": "1",
        # An earlier attempt may still be on its way when the receipt is asked for.
        "Nats-Msg-Id": f"{account.receipt}-{account.num_taken}",
    }
    try:
        await js.publish(account.receipt, b"", headers=publication | receipt)
    except APIError as error:
        if error.err_code != _TAKEN_BEFORE:
            raise


def day_of(unix_s: float) -> str:
    """Return the day of a time in UTC, as counters are named by it: 20261129."""
    return time.strftime("%Y%m%d", time.gmtime(unix_s))


async def read_usage(
    js: JetStreamContext, most: int | None = None, *, tenant: str | None = None, day: str | None = None
) -> AsyncIterator[UsageTotal]:
    """Yield the totals, of very many those that changed least recently, as many of each measure.

    Args:
        js: Where they are.
        most: As many at most.
        tenant: Whose; None for all.
        day: Those of one day, see `day_of`; None for those of all time.

    Raises:
        nats.errors.Error: NATS does not answer, or there is no such stream.
    """
    for measure in MEASURES:
        num_read = 0
        async for _, subject, data, _ in _counters(js, measure if day is None else f"{measure}-{day}", tenant):
            if most is not None and num_read >= most // len(MEASURES):
                break
            num_read += 1
            owner, model, lane, _ = subject.split(".")[2:]
            try:
                total = int(json.loads(data)["val"])
                yield UsageTotal(decode_name(owner), decode_name(model), lane, measure, total)
            except (ValueError, KeyError, TypeError, InvalidNameError):
                continue  # of another version


async def delete_old_receipts(js: JetStreamContext, now: datetime | None = None) -> None:
    """Delete the receipts of processes that have ended long ago.

    Raises:
        nats.errors.Error: NATS does not answer, or we may not.
    """
    now = now or datetime.now(UTC)
    async for seq, _, _, changed in _counters(js, _RECEIPTS):
        if (now - changed).total_seconds() > _RECEIPT_KEPT_S:
            await js.delete_msg(USAGE_STREAM, seq)


async def delete_old_days(js: JetStreamContext, now: float | None = None) -> None:
    """Delete the counters of single days that are older than `DAYS_KEPT`; `now` is Unix seconds.

    Raises:
        nats.errors.Error: NATS does not answer, or we may not.
    """
    oldest = day_of((time.time() if now is None else now) - DAYS_KEPT * _DAY_S)
    state = (await js.stream_info(USAGE_STREAM, subjects_filter="hr.usage.>")).state
    for subject in state.subjects or {}:
        day = subject.rpartition("-")[2]
        if len(day) == len(oldest) and day.isdigit() and "." not in day and day < oldest:
            message = await js.get_last_msg(USAGE_STREAM, subject)
            assert message.seq is not None
            await js.delete_msg(USAGE_STREAM, message.seq)


async def _counters(
    js: JetStreamContext, measure: str, tenant: str | None = None
) -> AsyncIterator[tuple[int, str, bytes, datetime]]:
    """Yield number, subject, content and time of a measure's counters, those that changed least recently first."""
    seq, subject = 0, f"hr.usage.{'*' if tenant is None else encode_name(tenant)}.*.*.{measure}"
    while True:
        try:
            message = await js.get_msg(USAGE_STREAM, seq=seq + 1, subject=subject, next=True)
        except NotFoundError as error:
            if error.err_code == _NO_MORE:
                return
            raise
        assert message.seq is not None
        assert message.time is not None
        seq = message.seq
        yield seq, message.subject or "", message.data or b"", message.time
