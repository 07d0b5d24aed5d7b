"""What tenants have had is added up by NATS, once, whoever counts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError

from shared.streams import USAGE_STREAM, StreamLimits, ensure_streams
from shared.usage_ledger import UsageLedger, read_usage
from tests.servers import NatsServer

TOKENS = {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 3}


@pytest.fixture
async def js(start_nats: Callable[..., NatsServer]) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(start_nats().url)
    await ensure_streams(client.jetstream(), StreamLimits())
    yield client.jetstream()
    await client.close()


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


async def test_change_whose_acknowledgement_was_lost_counts_once(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.usage_ledger._PAUSE_S", 0.0)
    ledger, publish, num_lost = UsageLedger("batch"), js.publish, 0

    async def losing(*arguments: object, **options: object) -> object:
        nonlocal num_lost
        taken = await publish(*arguments, **options)
        if num_lost < 2:
            num_lost += 1
            raise nats.errors.TimeoutError
        return taken

    monkeypatch.setattr(js, "publish", losing)
    ledger.add("t", "m", **TOKENS)
    for _ in range(3):
        await ledger.flush(js)
        # What is counted meanwhile waits for the next turn.
        ledger.add("t", "m", **TOKENS)
    await ledger.flush(js)
    assert num_lost == 2
    assert (await totals(js))["t", "m", "batch", "requests"] == 4


async def test_change_that_was_taken_before_a_long_outage_counts_once(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS recognises a change that is sent again for as long as its window."""
    config = (await js.stream_info(USAGE_STREAM)).config
    await js.update_stream(config.evolve(duplicate_window=0.1))
    monkeypatch.setattr("shared.usage_ledger.USAGE_DUPLICATE_WINDOW_S", 0.1)
    ledger, publish = UsageLedger("interactive"), js.publish

    async def losing(*arguments: object, **options: object) -> object:
        await publish(*arguments, **options)
        raise nats.errors.TimeoutError

    ledger.add("t", "m", **TOKENS)
    with monkeypatch.context() as lost:
        lost.setattr(js, "publish", losing)
        await ledger.flush(js)
    # Longer than the window, of which NATS looks now and then what has left it.
    await asyncio.sleep(0.5)
    ledger.add("t", "m", **TOKENS)
    await ledger.flush(js)
    counts = {measure: total for (*_, measure), total in (await totals(js)).items()}
    assert counts == {"requests": 2, "prompt_tokens": 10, "completion_tokens": 6}


async def test_without_the_stream_nothing_is_lost_but_told(
    start_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shared.usage_ledger._PAUSE_S", 0.0)
    client = await nats.connect(start_nats().url)
    ledger = UsageLedger("interactive")
    ledger.add("t", "m", **TOKENS)
    await ledger.flush(client.jetstream())
    assert "run `headrace setup`" in caplog.text
    await ensure_streams(client.jetstream(), StreamLimits())
    await ledger.flush(client.jetstream())
    assert (await totals(client.jetstream()))["t", "m", "interactive", "completion_tokens"] == 3
    await client.close()


async def test_what_was_counted_around_an_outage_is_sent_when_the_process_ends(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [nats.errors.TimeoutError(), NoStreamResponseError()]
    publish = js.publish

    async def failing(*arguments: object, **options: object) -> object:
        if errors:
            raise errors.pop(0)
        return await publish(*arguments, **options)

    async def counted() -> int:
        return (await totals(js)).get(("t", "m", "interactive", "requests"), 0)

    monkeypatch.setattr(js, "publish", failing)
    ledger = UsageLedger("interactive")
    ledger.add("t", "m", **TOKENS)
    await ledger.flush(js)
    assert "sent again" in caplog.text
    assert "headrace setup" not in caplog.text
    ledger.add("t", "m", **TOKENS)
    # A slow answer is no reason to pause: this turn asks again, and is refused.
    await ledger.flush(js)
    assert "headrace setup" in caplog.text
    ledger.add("t", "m", **TOKENS)
    await ledger.flush(js)
    assert (errors, await counted()) == ([], 0)
    await ledger.flush(js, is_last=True)
    assert await counted() == 3
