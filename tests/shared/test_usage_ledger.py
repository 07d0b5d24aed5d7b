"""What tenants have had is added up by NATS, once, whoever counts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from shared.messages import Lane
from shared.receipt import Receipt
from shared.streams import HOURS_STREAM, USAGE_STREAM, StreamLimits, ensure_streams, reshape_streams, stream_configs
from shared.usage_ledger import (
    MEASURES,
    UsageLedger,
    day_of,
    delete_old_days,
    delete_old_receipts,
    hour_of,
    read_hours,
    read_usage,
)
from tests.servers import NatsServer

TOKENS = {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 3}


@pytest.fixture
async def js(start_nats: Callable[..., NatsServer]) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(start_nats().url)
    await ensure_streams(client.jetstream(), StreamLimits())
    yield client.jetstream()
    await client.close()


@pytest.fixture
async def bare(
    start_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JetStreamContext]:
    """A server without streams, which is asked again at once after a refusal."""
    monkeypatch.setattr("shared.usage_ledger._PAUSE_S", 0.0)
    client = await nats.connect(start_nats().url)
    yield client.jetstream()
    await client.close()


async def count(js: JetStreamContext, ledger: UsageLedger) -> None:
    ledger.add("t", "m", **TOKENS)
    await ledger.flush(js)


async def by_measure(js: JetStreamContext) -> dict[str, int]:
    return {measure: total for (*_, measure), total in (await totals(js)).items()}


async def totals(js: JetStreamContext) -> dict[tuple[str, str, str, str], int]:
    return {(each.tenant, each.model, each.lane, each.measure): each.total async for each in read_usage(js)}


async def test_counts_of_all_processes_and_lanes_are_added_up(js: JetStreamContext) -> None:
    for _ in range(2):  # two lives of a gateway, and of a worker
        gateway, worker = UsageLedger("interactive"), UsageLedger("batch")
        for _ in range(3):
            gateway.add("acme & co", "org/m.v1", **TOKENS)
        worker.add("acme & co", "org/m.v1", **TOKENS)
        for ledger in (gateway, worker):
            await ledger.flush(js)
            await ledger.flush(js)
    expected = {"requests": 1, "prompt_tokens": 5, "completion_tokens": 3}
    assert await totals(js) == {
        ("acme & co", "org/m.v1", lane, measure): count * times
        for lane, times in (("interactive", 6), ("batch", 2))
        for measure, count in expected.items()
    }


async def flush_unacknowledged(js: JetStreamContext, ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush the counts so that NATS stores them but the acknowledgement is lost."""
    publish = js.publish

    async def losing(*arguments: Any, **options: Any) -> object:
        await publish(*arguments, **options)
        raise nats.errors.TimeoutError

    with monkeypatch.context() as lost:
        lost.setattr(js, "publish", losing)
        await ledger.flush(js)


@pytest.mark.parametrize("lane", ["interactive", "batch"])
async def test_change_whose_acknowledgement_was_lost_counts_once(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch, lane: Lane
) -> None:
    ledger = UsageLedger(lane)
    for _ in range(3):
        ledger.add("t", "m", **TOKENS)
        # Of the second and third, the acknowledgement of the receipt is lost.
        await flush_unacknowledged(js, ledger, monkeypatch)
    for _ in range(2):
        await ledger.flush(js)
    assert (await totals(js))["t", "m", lane, "requests"] == 3
    assert (await totals(js))["t", "m", lane, "completion_tokens"] == 9


@pytest.mark.parametrize("lane", ["interactive", "batch"])
@pytest.mark.parametrize("is_taken", [True, False])
async def test_change_around_an_outage_counts_once_whatever_others_count_and_however_long_it_is(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch, lane: Lane, *, is_taken: bool
) -> None:
    """NATS recognises a message that is sent again for as long as its window, and then only by its receipt."""
    config = (await js.stream_info(USAGE_STREAM)).config
    await js.update_stream(config.evolve(duplicate_window=0.1))
    ledger, other = UsageLedger(lane), UsageLedger(lane)
    ledger.add("t", "m", **TOKENS)
    if is_taken:
        await flush_unacknowledged(js, ledger, monkeypatch)
    else:
        with monkeypatch.context() as away:
            away.setattr(js, "publish", AsyncMock(side_effect=nats.errors.TimeoutError))
            await ledger.flush(js)
    # Longer than the window, of which NATS looks now and then what has left it.
    await asyncio.sleep(0.5)
    await count(js, other)
    await count(js, ledger)
    assert await by_measure(js) == {"requests": 3, "prompt_tokens": 15, "completion_tokens": 9}


async def test_attempt_that_arrives_after_its_repetition_counts_once(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, kept = UsageLedger("batch"), []

    async def delayed(*arguments: Any, **options: Any) -> None:
        kept.append((arguments, options))
        raise nats.errors.TimeoutError

    ledger.add("t", "m", **TOKENS)
    with monkeypatch.context() as slow:
        slow.setattr(js, "publish", delayed)
        await ledger.flush(js)
    await ledger.flush(js)
    (arguments, options), _ = kept
    with pytest.raises(APIError, match="duplicate"):
        await js.publish(*arguments, **options)
    assert (await totals(js))["t", "m", "batch", "requests"] == 1


async def test_nothing_of_a_publication_counts_that_is_cut_off(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lacks a message is refused whole, and sent again."""
    monkeypatch.setattr("shared.usage_ledger._PAUSE_S", 0.0)
    ledger, publish = UsageLedger("batch"), js._nc.publish

    async def cut(subject: str, *arguments: Any, **options: Any) -> None:
        if not subject.endswith(".prompt_tokens"):
            await publish(subject, *arguments, **options)

    ledger.add("t", "m", **TOKENS)
    with monkeypatch.context() as slow:
        slow.setattr(js._nc, "publish", cut)
        await ledger.flush(js)
    assert await totals(js) == {}
    await ledger.flush(js)
    assert await by_measure(js) == {"requests": 1, "prompt_tokens": 5, "completion_tokens": 3}


async def test_more_changes_than_one_publication_holds_are_all_counted(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.usage_ledger._MAX_CHANGES", 4)
    ledger = UsageLedger("interactive")
    for tenant in range(5):
        ledger.add(f"t{tenant}", "m", **TOKENS)
        ledger.add(f"t{tenant}", "n", **TOKENS)
    await ledger.flush(js)
    assert sorted((await totals(js)).values()) == [1] * 10 + [3] * 10 + [5] * 10


async def test_receipts_are_no_usage_and_old_ones_are_deleted(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, now = UsageLedger("batch"), datetime.now(UTC)
    await count(js, ledger)
    assert set(await by_measure(js)) == {"requests", "prompt_tokens", "completion_tokens"}
    for days, num_messages in ((29, 7), (31, 6)):
        await delete_old_receipts(js, now + timedelta(days=days))
        assert (await js.stream_info(USAGE_STREAM)).state.messages == num_messages
    # A process that has been idle for so long begins a new receipt.
    monkeypatch.setattr("shared.usage_ledger._RECEIPT_USED_S", 0.0)
    ledger.add("t", "m", **TOKENS)
    await flush_unacknowledged(js, ledger, monkeypatch)
    await ledger.flush(js)
    assert (await totals(js))["t", "m", "batch", "requests"] == 2


@pytest.mark.parametrize("is_of_version_before", [True, False])
async def test_without_a_stream_of_this_version_nothing_is_lost_but_told(
    bare: JetStreamContext, caplog: pytest.LogCaptureFixture, *, is_of_version_before: bool
) -> None:
    if is_of_version_before:
        [config] = [config for config in stream_configs(StreamLimits()) if config.name == USAGE_STREAM]
        await bare.add_stream(config.evolve(allow_atomic=None))
        await ensure_streams(bare, StreamLimits())
    ledger = UsageLedger("batch")
    await count(bare, ledger)
    assert "run `headrace setup`" in caplog.text
    await ensure_streams(bare, StreamLimits())
    await reshape_streams(bare, StreamLimits())
    await ledger.flush(bare)
    assert (await totals(bare))["t", "m", "batch", "completion_tokens"] == 3


@pytest.mark.parametrize("is_of_version_before", [True, False])
async def test_few_large_messages_push_out_no_counter(bare: JetStreamContext, *, is_of_version_before: bool) -> None:
    js, limits = bare, StreamLimits(usage_max_bytes=256 << 10)
    if is_of_version_before:
        [config] = [config for config in stream_configs(limits) if config.name == USAGE_STREAM]
        await js.add_stream(config.evolve(max_msg_size=None))
    await ensure_streams(js, limits)
    await reshape_streams(js, limits)
    ledger = UsageLedger("interactive")
    await count(js, ledger)
    for number in range(8):
        with pytest.raises(APIError, match="message size exceeds maximum"):
            await js.publish(f"hr.usage.x.m.batch.x{number}", headers={"Nats-Incr": "+1", "X": "x" * 60_000})
    await count(js, ledger)
    assert (await totals(js))["t", "m", "interactive", "completion_tokens"] == 6


async def test_hours_that_a_system_of_the_version_before_does_not_keep_take_nothing_from_the_totals(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shared.usage_ledger._MAX_WAITING", 3)
    await js.delete_stream(HOURS_STREAM)
    ledger = UsageLedger("interactive")
    for number in range(9):
        ledger.add(f"t{number}", "m", **TOKENS)
        await ledger.flush(js)
    assert "by the hour is not kept" in caplog.text
    assert sum((await totals(js)).values()) == 9 * (1 + 5 + 3)
    assert len(ledger._accounts[1]["m"].counted) <= 3


async def test_what_was_counted_around_an_outage_is_sent_when_the_process_ends(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [nats.errors.TimeoutError(), NoStreamResponseError()]
    publish = js.publish

    async def failing(subject: str, *arguments: object, **options: object) -> object:
        if errors and subject.startswith("hr.usage."):
            raise errors.pop(0)
        return await publish(subject, *arguments, **options)

    async def counted() -> int:
        return (await totals(js)).get(("t", "m", "interactive", "requests"), 0)

    monkeypatch.setattr(js, "publish", failing)
    ledger = UsageLedger("interactive")
    await count(js, ledger)
    assert "sent again" in caplog.text
    assert "headrace setup" not in caplog.text
    ledger.add("t", "m", **TOKENS)
    # A slow answer is not a reason to pause: this turn asks again, and is refused.
    await ledger.flush(js)
    assert "headrace setup" in caplog.text
    await count(js, ledger)
    assert (errors, await counted()) == ([], 0)
    await ledger.flush(js, is_last=True)
    assert await counted() == 3


async def test_days_are_counted_apart_by_tenant_and_old_ones_are_deleted(js: JetStreamContext) -> None:
    now = [1_700_000_000.0]
    ledger = UsageLedger("interactive", clock=lambda: now[0])
    receipt = Receipt(taken=0.0, device_s=0.0125, energy_j=2.5)
    for tenant in ("acme & co", "other"):
        ledger.add(tenant, "m", **TOKENS)
    ledger.add_time("acme & co", "m", receipt)
    now[0] += 86400
    ledger.add("acme & co", "m", **TOKENS)
    await ledger.flush(js)

    async def day(number: int) -> dict[str, int]:
        name = day_of(1_700_000_000 + 86400 * number)
        return {each.measure: each.total async for each in read_usage(js, tenant="acme & co", period=name)}

    first = {"requests": 1, "prompt_tokens": 5, "completion_tokens": 3, "device_us": 12_500, "energy_mj": 2500}
    assert (await day(0), (await day(1))["requests"], await day(2)) == (first, 1, {})
    whole = {each.measure: each.total async for each in read_usage(js, tenant="acme & co")}
    assert (whole["requests"], whole["device_us"]) == (2, 12_500)
    hours = {each.measure: each.total async for each in read_usage(js, period=hour_of(now[0]), measures=MEASURES[:4])}
    assert hours == {measure: whole[measure] // 2 for measure in ("requests", "prompt_tokens", "completion_tokens")}
    assert not [each async for each in read_usage(js, period=hour_of(now[0] - 3600))]
    walked = [(hour, each.measure, each.total) async for hour, each in read_hours(js, "acme & co")]
    assert sorted(walked) == sorted(
        [(hour_of(now[0] - 86400), *each) for each in first.items()]
        + [(hour_of(now[0]), *each) for each in hours.items()]
    )
    await delete_old_days(js, now[0] + 400 * 86400)
    assert (await day(0), (await day(1))["requests"]) == ({}, 1)
    assert (await totals(js))["acme & co", "m", "interactive", "requests"] == 2


async def test_totals_without_their_stream_are_an_error_and_not_none_at_all(bare: JetStreamContext) -> None:
    with pytest.raises(NotFoundError, match="stream not found"):
        await anext(read_usage(bare))
