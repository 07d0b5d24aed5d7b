"""Reads of usage: however many come at once, few are under way, and what they tell is what was counted."""

from __future__ import annotations

import asyncio
import json
import re
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.js.errors import NotFoundError
from starlette.requests import Request

from gateway.admission.auth import Principal
from gateway.admission.limits import RateLimiter
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.usage.reader import MAX_OF_TENANT, MAX_READS, UsageReader
from gateway.usage.routes import UsageRoutes
from shared.subjects import hour_subject
from shared.usage_ledger import hour_of
from tests.clock import Clock

NOW = 1_700_000_000.0
HOUR_S = 3600.0


class Counters:
    """A stream of counters, each call of which takes a turn of the loop."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, int]] = []
        self.num_calls = self.under_way = self.most_under_way = 0

    def add(self, at: float, count: int, measure: str = "requests", tenant: str = "t") -> None:
        self.messages.append((hour_subject(tenant, "m", "interactive", f"{measure}-{hour_of(at)}"), count))

    async def get_msg(self, stream: str, *, seq: int, subject: str, next: bool) -> SimpleNamespace:
        assert (stream, next) == ("HR_HOURS", True)
        self.num_calls += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        wanted = re.compile(re.escape(subject).replace(r"\*", r"[^.]+"))
        for number, (found, count) in enumerate(self.messages, start=1):
            if number >= seq and wanted.fullmatch(found):
                data = json.dumps({"val": str(count)}).encode()
                return SimpleNamespace(seq=number, subject=found, data=data, time=datetime.now(UTC))
        raise NotFoundError(code=404, err_code=10037)


def limiter() -> RateLimiter:
    return RateLimiter(None, GatewayMetrics())


def reader(counters: Counters, clock: Clock | None = None) -> UsageReader:
    return UsageReader(cast("Any", counters), limiter(), clock or Clock(NOW))


def week(now: float = NOW) -> list[str | None]:
    return [hour_of(now - HOUR_S * number) for number in reversed(range(168))]


async def asked(counters: Counters, tenants: list[str]) -> list[Any]:
    """Ask the gateway for a week of hours once for each of these; return the answers and refusals."""
    services = SimpleNamespace(config=GatewayConfig(), limiter=limiter())
    routes = UsageRoutes(cast("Any", services), cast("Any", counters), None).routes()
    [serve] = [route.handler for route in routes if route.path.endswith("completions")]
    query = f"start_time={int(time.time()) - 7 * 86400}&bucket_width=1h&limit=168".encode()
    requests = [Request({"type": "http", "query_string": query, "headers": []}) for _ in tenants]
    answers = (serve(each, Principal("k", tenant)) for each, tenant in zip(requests, tenants, strict=True))
    return await asyncio.gather(*answers, return_exceptions=True)


async def test_hundreds_of_reads_of_one_tenant_make_one_walk_and_the_rest_is_told_to_return() -> None:
    counters = Counters()
    counters.add(time.time() - 5 * HOUR_S, 3)
    answers = await asked(counters, ["t"] * 850)
    refusals = [each for each in answers if isinstance(each, ApiError)]
    assert {(each.status, each.code, each.retry_after_s) for each in refusals} == {(429, "too_many_reads", 1.0)}
    assert len(answers) - len(refusals) == MAX_OF_TENANT
    for page in (json.loads(each.body) for each in answers if not isinstance(each, ApiError)):
        assert len(page["data"]) == 168
        assert sum(each["num_model_requests"] for bucket in page["data"] for each in bucket["results"]) == 3
    # The hours that have ended are read once, for all.
    assert counters.num_calls < 40
    assert counters.most_under_way <= 4


async def test_days_of_usage_begin_with_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []

    async def note(principal: Principal, days: list[str]) -> list[Any]:
        read.append(days)
        return []

    services = SimpleNamespace(config=GatewayConfig(), limiter=limiter())
    routes = UsageRoutes(cast("Any", services), cast("Any", Counters()), None)
    monkeypatch.setattr(routes._reader, "read", note)
    first, _, last = days = [datetime.now(UTC).date() - timedelta(days=number) for number in (3, 2, 1)]
    query = f"start={first}&end={last}".encode()
    answer = await routes._usage(Request({"type": "http", "query_string": query, "headers": []}), Principal("k", "t"))
    assert read == [[f"{day:%Y%m%d}" for day in days]]
    assert json.loads(bytes(answer.body))["start"] == str(first)


async def test_reads_of_many_tenants_are_few_at_once_and_none_waits_for_another_tenants_queue() -> None:
    counters = Counters()
    answers = await asked(counters, ["loud"] * 100 + [f"t{number}" for number in range(40)])
    assert not [each for each in answers[100:] if isinstance(each, BaseException)]
    assert counters.most_under_way <= MAX_READS
    assert not isinstance((await asked(counters, ["loud"]))[0], BaseException)


async def test_process_with_enough_reads_in_hand_refuses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.usage.reader.MAX_OF_PROCESS", 3)
    answers = await asked(Counters(), [f"t{number}" for number in range(5)])
    assert [each.status if isinstance(each, ApiError) else each.status_code for each in answers] == [200] * 3 + [
        503
    ] * 2


async def test_one_walk_tells_what_a_walk_for_each_hour_tells() -> None:
    counters = Counters()
    for number in range(12):
        counters.add(NOW - number * HOUR_S, number + 1)
        counters.add(NOW - number * HOUR_S, 100 * number + 7, "completion_tokens")
        counters.add(NOW - number * HOUR_S, 9, tenant="other")
    principal, hours = Principal("k", "t"), week()
    told = await reader(counters).read(principal, hours, ("requests", "completion_tokens"))
    apart = [(await reader(counters).read(principal, [each], ("requests", "completion_tokens")))[0] for each in hours]
    assert told == apart
    assert told[-3:] == [
        {("m", "interactive"): {"requests": n + 1, "completion_tokens": 100 * n + 7}} for n in (2, 1, 0)
    ]
    assert (await reader(counters).read(principal, hours, ("requests",)))[-1] == {("m", "interactive"): {"requests": 1}}


async def test_ended_hours_are_kept_for_a_while_and_counts_that_arrive_late_are_told_then() -> None:
    counters, clock = Counters(), Clock(NOW)
    usage, principal = reader(counters, clock), Principal("k", "t")

    async def totals() -> int:
        told = await usage.read(principal, week(), ("requests",))
        return sum(counts["requests"] for each in told for counts in each.values())

    counters.add(NOW - 3 * HOUR_S, 5)
    assert await totals() == 5
    before = counters.num_calls
    counters.add(NOW, 2)
    counters.add(NOW - 4 * HOUR_S, 10)
    assert await totals() == 7, "this hour is read anew"
    assert counters.num_calls - before <= 3
    clock.now += 601
    assert await totals() == 17


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.usage.reader._MAX_KEPT", 200)
    usage = reader(Counters())
    for number in range(4):
        await usage.read(Principal("k", f"t{number}"), week(), ("requests",))
    assert len(usage._kept) <= 200


async def test_read_counts_by_its_periods() -> None:
    usage, principal = reader(Counters()), Principal("k", "t", reads_per_minute=22)
    await usage.read(principal, week())
    await usage.read(principal, week()[:1])
    with pytest.raises(ApiError, match="22 reads") as refusal:
        await usage.read(principal, week()[:1])
    assert refusal.value.status == 429


async def test_reads_that_fail_or_are_given_up_leave_their_places() -> None:
    class Away(Counters):
        async def get_msg(self, stream: str, **options: Any) -> SimpleNamespace:
            raise OSError

    usage, principal = reader(Away()), Principal("k", "t")
    for _ in range(2 * MAX_OF_TENANT):
        with pytest.raises(ApiError, match="NATS"):
            await usage.read(principal, week())
    usage = reader(Counters())
    for _ in range(2):
        reads = [asyncio.create_task(usage.read(principal, week())) for _ in range(MAX_OF_TENANT)]
        await asyncio.sleep(0)
        for read in reads:
            read.cancel()
        assert {type(each) for each in await asyncio.gather(*reads, return_exceptions=True)} == {asyncio.CancelledError}
    assert len(await usage.read(principal, week())) == 168
