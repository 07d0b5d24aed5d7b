"""What each tenant has had of each model, by lane: counted by gateways and workers, added up by NATS, kept for good.

The stream `HR_USAGE` is one of counters: a message names a change, NATS adds it to the total of its subject. So totals
outlive every process. Gateways count answers over HTTP, workers jobs of the batch lane. A process that is killed loses
what it has counted in the last `FLUSH_S`. `HR_HOURS` is another one, of single hours, which forgets them after a week.

The changes of one model are published together with a change of the sender's own counter, its receipt, and NATS takes
all of them or none. So a process that got no acknowledgement asks its receipt whether they were taken, however long
the outage was and however many others count the same.

Callers that read or delete counters get the errors of NATS where it does not answer, refuses, or lacks the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
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
from shared.streams import HOURS_STREAM, USAGE_STREAM
from shared.subjects import decode_name, encode_name, hour_subject, usage_subject

FLUSH_S = 5.0
# After NATS refused a change: the stream may be missing.
_PAUSE_S = 30.0
# Of one publication; NATS takes a thousand messages.
_MAX_CHANGES = 500
# `headrace setup` deletes receipts that have not changed for so long; a process begins a new one much earlier.
_RECEIPT_KEPT_S = 30 * 86400.0
_RECEIPT_USED_S = 86400.0
Measure = Literal["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "device_us", "energy_mj"]
"""`device_us` are microseconds of devices, `energy_mj` their millijoules. Each measure has a counter for all time, one
for each day of UTC, which `headrace setup` deletes after `DAYS_KEPT`, and one for each hour."""
MEASURES: tuple[Measure, ...] = get_args(Measure)
DAYS_KEPT = 400
_DAY_S, _HOUR_S = 86400, 3600
# Unsent hourly counters kept for each model; the totals include dropped ones all the same.
_MAX_WAITING = 4096
HOUR_DIGITS = len("2026112923")
_ANY_HOUR = "*"
_RECEIPTS = "receipts"

_REFUSALS: tuple[type[Exception], ...] = (APIError, NoStreamResponseError)
_NO_MORE = 10037
_TAKEN_BEFORE = 10201

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Account:
    """Counts of one model, for one stream.

    Attributes:
        receipt: Subject of a counter that this process alone changes, by 1 with each publication.
        counted: Unsent counts by subject.
        sending: Sent counts by subject that NATS has not confirmed.
        is_doubtful: Whether NATS may have taken `sending`.
        num_taken: How many publications NATS has taken.
        taken_at: Monotonic seconds of the last one.
    """

    receipt: str
    counted: Counter[str] = field(default_factory=Counter)
    sending: dict[str, int] = field(default_factory=dict)
    is_doubtful: bool = False
    num_taken: int = 0
    taken_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """One total."""

    tenant: str
    model: str
    lane: str
    measure: str
    total: int


class UsageLedger:
    """Counts in memory, and sends the counts. Only the event loop's thread writes them."""

    def __init__(self, lane: Lane, clock: Callable[[], float] = time.time) -> None:
        """Count answers of a lane; nothing is sent before `flush`. Hours are those of `clock`, in Unix seconds."""
        self._clock = clock
        self._lane: Lane = lane
        # By tenant and model, this hour's counts since they were last sent, in the order of `MEASURES`.
        self._rows: dict[tuple[str, str], list[int]] = {}
        self._hour_began = 0.0
        # By model, for the stream of totals and for that of hours.
        self._accounts: tuple[dict[str, _Account], dict[str, _Account]] = ({}, {})
        self._paused_until = [0.0, 0.0]
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
        """Count the device time and energy of an attempt."""
        counts = self._counts(tenant, model)
        counts[4] += round(receipt.device_s * 1e6)
        if receipt.energy_j is not None:
            counts[5] += round(receipt.energy_j * 1e3)

    def _counts(self, tenant: str, model: str) -> list[int]:
        """Return the counts of a tenant and model in this hour. Called once or twice for each request."""
        now = self._clock()
        if not 0.0 <= now - self._hour_began < _HOUR_S:
            self._post()
            self._hour_began = now // _HOUR_S * _HOUR_S
        return self._rows.setdefault((tenant, model), [0] * len(MEASURES))

    def _post(self) -> None:
        """Add the counts to the accounts."""
        rows, self._rows = self._rows, {}
        day, hour = day_of(self._hour_began), hour_of(self._hour_began)
        for (tenant, model), counts in rows.items():
            totals, hours = self._account(0, model).counted, self._account(1, model).counted
            for measure, count in zip(MEASURES, counts, strict=True):
                if count:
                    totals[usage_subject(tenant, model, self._lane, measure)] += count
                    totals[usage_subject(tenant, model, self._lane, f"{measure}-{day}")] += count
                    hours[hour_subject(tenant, model, self._lane, f"{measure}-{hour}")] += count
        for account in self._accounts[1].values():
            for subject in list(account.counted)[:-_MAX_WAITING]:
                del account.counted[subject]

    def _account(self, place: int, model: str) -> _Account:
        account = self._accounts[place].get(model)
        is_busy = account is not None and (account.sending or account.counted)
        # An old receipt may soon be deleted.
        if account is None or (not is_busy and time.monotonic() - account.taken_at > _RECEIPT_USED_S):
            subject = hour_subject if place else usage_subject
            account = _Account(subject(secrets.token_hex(8), model, self._lane, _RECEIPTS))
            self._accounts[place][model] = account
        return account

    async def flush(self, js: JetStreamContext, *, is_last: bool = False) -> None:
        """Send the counts; those that NATS does not take are sent again, and count once.

        `is_last`: the process ends, so it is tried whatever NATS said before.
        """
        async with self._is_flushing:
            self._post()
            for place, accounts in enumerate(self._accounts):
                if is_last or time.monotonic() >= self._paused_until[place]:
                    await self._send_all(js, place, list(accounts.values()))

    async def _send_all(self, js: JetStreamContext, place: int, accounts: list[_Account]) -> None:
        what = ("usage of tenants", "usage of tenants by the hour")[place]
        try:
            for account in accounts:
                await self._send(js, account)
        except _REFUSALS as error:
            self._paused_until[place] = time.monotonic() + _PAUSE_S
            told = "%s is not kept (%r): check NATS's disk and permissions, and run `headrace setup`"
            self._log_limit.warning(what, told, what, error)
        except SEND_ERRORS as error:
            # NATS does not answer a change that it does not permit either.
            told = "%s is not kept yet (%r), it is sent again; or NATS's permissions are missing"
            self._log_limit.warning(f"unanswered {what}", told, what, error)

    async def _send(self, js: JetStreamContext, account: _Account) -> None:
        while account.sending or account.counted:
            # Counts stay in `sending` until NATS has taken them.
            if not account.sending:
                account.sending = dict(list(account.counted.items())[:_MAX_CHANGES])
                for subject in account.sending:
                    del account.counted[subject]
            if not (account.is_doubtful and await _was_taken(js, account)):
                account.is_doubtful = True
                await _publish(js, account)
            account.sending, account.is_doubtful, account.taken_at = {}, False, time.monotonic()
            account.num_taken += 1

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
    """Publish changes and their receipt so that NATS takes all or none."""
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


def hour_of(unix_s: float) -> str:
    """Return the hour of a time in UTC, as counters are named by it: 2026112923."""
    return time.strftime("%Y%m%d%H", time.gmtime(unix_s))


async def read_usage(
    js: JetStreamContext,
    most: int | None = None,
    *,
    tenant: str | None = None,
    period: str | None = None,
    measures: Sequence[Measure] = MEASURES,
) -> AsyncIterator[UsageTotal]:
    """Yield the totals, of very many those that changed least recently, as many of each measure.

    Args:
        js: Where they are.
        most: As many at most.
        tenant: Whose; None for all.
        period: Those of one day or hour, see `day_of` and `hour_of`; None for those of all time.
        measures: Which; where only a part is asked for, the first is one without which there are no others.
    """
    for measure in measures:
        num_read = 0
        async for _, subject, data, _ in _counters(js, measure if period is None else f"{measure}-{period}", tenant):
            if most is not None and num_read >= most // len(MEASURES):
                break
            num_read += 1
            if (found := _total(subject, data, measure)) is not None:
                yield found
        if len(measures) < len(MEASURES) and measure == measures[0] and not num_read:
            return


async def read_hours(js: JetStreamContext, tenant: str) -> AsyncIterator[tuple[str, UsageTotal]]:
    """Yield a tenant's totals of all hours, each with its hour (see `hour_of`), in one walk.

    What changes meanwhile may come twice; the later one is right.
    """
    async for _, subject, data, _ in _counters(js, _ANY_HOUR, tenant):
        measure, _, hour = subject.rpartition(".")[2].rpartition("-")
        if (found := _total(subject, data, measure)) is not None:
            yield hour, found


def _total(subject: str, data: bytes, measure: str) -> UsageTotal | None:
    """Return the total of a counter, None for another version's."""
    owner, model, lane, _ = subject.split(".")[2:]
    try:
        return UsageTotal(decode_name(owner), decode_name(model), lane, measure, int(json.loads(data)["val"]))
    except (ValueError, KeyError, TypeError, InvalidNameError):
        return None


async def delete_old_receipts(js: JetStreamContext, now: datetime | None = None) -> None:
    """Delete the receipts of processes that have ended long ago."""
    now = now or datetime.now(UTC)
    async for seq, _, _, changed in _counters(js, _RECEIPTS):
        if (now - changed).total_seconds() > _RECEIPT_KEPT_S:
            await js.delete_msg(USAGE_STREAM, seq)


async def delete_old_days(js: JetStreamContext, now: float | None = None) -> None:
    """Delete the counters of single days that are older than `DAYS_KEPT`; `now` is Unix seconds."""
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
    is_hour = measure == _ANY_HOUR or measure[-HOUR_DIGITS:].isdigit()
    stream, prefix = (HOURS_STREAM, "hr.hours") if is_hour else (USAGE_STREAM, "hr.usage")
    seq, subject = 0, f"{prefix}.{'*' if tenant is None else encode_name(tenant)}.*.*.{measure}"
    while True:
        try:
            message = await js.get_msg(stream, seq=seq + 1, subject=subject, next=True)
        except NotFoundError as error:
            if error.err_code == _NO_MORE:
                return
            raise
        assert message.seq is not None
        assert message.time is not None
        seq = message.seq
        yield seq, message.subject or "", message.data or b"", message.time
