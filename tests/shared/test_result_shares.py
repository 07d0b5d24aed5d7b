"""Each tenant's share of the stream of results, on a real NATS server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js import JetStreamContext
from nats.js.errors import APIError

from shared.kept_results import KeptResults
from shared.nats_connection import connect
from shared.result_shares import NEARLY_FULL, ResultShares, fair_share
from shared.server_clock import ServerClock
from shared.streams import ENDS_STREAM, RESULTS_STREAM, StreamLimits, ensure_streams
from tests.servers import NatsServer

MAX_BYTES = 4 << 20
RESULT = b"x" * 8000


@pytest.fixture
async def js(start_nats: Callable[..., NatsServer]) -> AsyncIterator[JetStreamContext]:
    client = await connect(start_nats().url, role="worker", name="w")
    try:
        js = client.jetstream()
        await ensure_streams(js, StreamLimits(results_max_bytes=MAX_BYTES, ends_max_bytes=1 << 18))
        yield js
    finally:
        await client.close()


async def _flood(kept: KeptResults, tenant: str, num_results: int, payload: bytes = RESULT, first: int = 0) -> None:
    for start in range(first, first + num_results, 50):
        numbers = range(start, min(start + 50, first + num_results))
        await asyncio.gather(*(kept.store(tenant, f"{tenant}{number}", payload, "stop") for number in numbers))


async def _ids(js: JetStreamContext, tenant: str) -> list[int]:
    subjects = (await js.stream_info(RESULTS_STREAM, subjects_filter=f"hr.result.{tenant}.*")).state.subjects or {}
    return sorted(int(subject.rpartition(tenant)[2]) for subject in subjects)


def _kept(js: JetStreamContext, *, can_purge: bool = True) -> KeptResults:
    return KeptResults(js, ResultShares(js, can_purge=can_purge, clock=ServerClock()))


async def test_flood_of_one_tenant_drops_its_own_oldest_results_and_none_of_others(js: JetStreamContext) -> None:
    first, second = _kept(js), _kept(js)
    await _flood(first, "quiet", 20)
    # Three times what the stream holds, through two workers.
    for turn in range(6):
        await _flood((first, second)[turn % 2], "loud", 250, first=250 * turn)
    assert await _ids(js, "quiet") == list(range(20))
    loud = await _ids(js, "loud")
    assert loud == list(range(loud[0], 1500))
    # It has the rest of the stream, since no other tenant uses it.
    assert len(loud) * len(RESULT) > MAX_BYTES * 0.4
    await asyncio.gather(first.shares.close(), second.shares.close())
    state = (await js.stream_info(RESULTS_STREAM)).state
    assert state.bytes < MAX_BYTES * (NEARLY_FULL + 0.05)


async def test_end_outlives_its_result(js: JetStreamContext) -> None:
    kept = _kept(js)
    await _flood(kept, "loud", 750)
    assert 0 not in await _ids(js, "loud")
    end = await kept.end_of("loud", "loud0")
    assert end.finish == "stop"
    assert await kept.end_of("loud", "none") is None


async def test_ends_of_one_tenant_leave_room_for_those_of_others(js: JetStreamContext) -> None:
    kept = _kept(js)
    await _flood(kept, "quiet", 20, b"x")
    for turn in range(7):
        await _flood(kept, "loud", 375, b"x", first=375 * turn)
        await kept.shares.purge()
    assert None not in [await kept.end_of("quiet", f"quiet{number}") for number in range(20)]
    assert await kept.end_of("loud", "loud2624") is not None
    assert await kept.end_of("loud", "loud0") is None
    assert (await js.stream_info(ENDS_STREAM)).state.bytes < 1 << 18


async def test_results_stored_by_who_may_not_purge_count_too(js: JetStreamContext) -> None:
    gateway, worker = _kept(js, can_purge=False), _kept(js)
    await _flood(worker, "quiet", 20)
    await worker.shares.close()
    await _flood(gateway, "loud", 400)
    await gateway.shares.close()
    assert len(await _ids(js, "loud")) == 400
    await worker.shares.purge()
    assert len(await _ids(js, "loud")) < 350
    assert await _ids(js, "quiet") == list(range(20))


async def test_results_are_stored_before_the_stream_of_ends_is_set_up(
    js: JetStreamContext, caplog: pytest.LogCaptureFixture
) -> None:
    await js.delete_stream(ENDS_STREAM)
    kept = _kept(js)
    async with asyncio.timeout(10):
        await _flood(kept, "t", 100)
        await kept.shares.close()
    assert await _ids(js, "t") == list(range(100))
    assert await kept.end_of("t", "t0") is None
    assert "check that `headrace setup` and NATS's permissions are of this version" in caplog.text


async def test_ledger_that_two_processes_write_at_once_counts_both(js: JetStreamContext) -> None:
    workers = [_kept(js) for _ in range(4)]
    # Many pieces at the same time, none of which may push out another's.
    await asyncio.gather(*(_flood(kept, "t", 100, first=100 * number) for number, kept in enumerate(workers)))
    await asyncio.gather(*(kept.shares.close() for kept in workers))
    pieces, _ = await workers[0].shares._ledger("t")
    num_bytes = sum(piece.num_bytes for piece in pieces)
    state = (await js.stream_info(RESULTS_STREAM)).state
    assert num_bytes == pytest.approx(state.bytes, rel=0.05)
    assert [piece.last_seq for piece in pieces] == sorted(piece.last_seq for piece in pieces)


async def test_result_is_stored_once_and_counted_once(js: JetStreamContext) -> None:
    kept = _kept(js)
    assert await kept.store("t", "r", b"first", "stop")
    assert not await kept.store("t", "r", b"second", "cancelled")
    assert (await js.get_last_msg(RESULTS_STREAM, "hr.result.t.r")).data == b"first"
    end = await kept.end_of("t", "r")
    assert end.finish == "stop"


@pytest.mark.parametrize("piece", [(2**64 - 1, 2**40), (1, -(2**60))])
async def test_ledger_with_numbers_that_cannot_be_stops_no_purge_of_others(
    js: JetStreamContext, piece: tuple[int, int]
) -> None:
    await js.publish("hr.kept.evil", msgspec.msgpack.encode([(*piece, time.time())]))
    kept = _kept(js)
    await _flood(kept, "quiet", 20)
    await _flood(kept, "loud", 750)
    await kept.shares.close()
    assert await _ids(js, "quiet") == list(range(20))
    assert (await js.stream_info(RESULTS_STREAM)).state.bytes < MAX_BYTES * (NEARLY_FULL + 0.05)


async def test_result_whose_end_is_refused_counts_against_its_tenant(js: JetStreamContext) -> None:
    kept = _kept(js)
    publish = js.publish

    async def refuse_ends(subject: str, *args: Any, **settings: Any) -> Any:
        if subject.startswith("hr.end."):
            raise APIError(code=503, err_code=10077, description="maximum bytes exceeded")
        return await publish(subject, *args, **settings)

    with patch.object(js, "publish", refuse_ends):
        for number in range(4):
            with pytest.raises(APIError):
                await kept.store("t", str(number), RESULT, "stop")
        await kept.shares.close()
    pieces, _ = await kept.shares._ledger("t")
    assert sum(piece.num_bytes for piece in pieces) > 4 * len(RESULT)


async def test_piece_whose_time_is_in_the_future_ages_from_when_its_ledger_was_written(js: JetStreamContext) -> None:
    future = time.time() + 10 * 365 * 86400.0
    await js.publish("hr.kept.ahead", msgspec.msgpack.encode([(1, 2**40, future)]))
    clock = Mock(ServerClock)
    clock.now.side_effect = lambda: time.time() + age_s
    shares, age_s = ResultShares(js, can_purge=True, clock=clock), 1.0
    assert (await shares._ledgers(60.0)).keys() == {"ahead"}
    age_s = 120.0
    assert await shares._ledgers(60.0) == {}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.integers(0, 5000))
def test_fair_share_fills_what_is_available_and_takes_from_the_largest(totals: list[int], available: int) -> None:
    share = fair_share(totals, available)
    kept = [min(total, share) for total in totals]
    assert sum(kept) <= available or share == 0
    if sum(totals) <= available:
        assert kept == totals
    else:
        # One more byte for each would be too much.
        assert sum(min(total, share + 1) for total in totals) > available
