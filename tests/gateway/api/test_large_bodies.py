from __future__ import annotations

import asyncio
import gzip
import random
import threading
from collections.abc import Callable

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.anthropic.message import MessagesEndpoint
from gateway.api.endpoint import ChatEndpoint, CompletionEndpoint, Endpoint
from gateway.api.large_bodies import LARGE_BYTES, MAX_WAITING_BYTES, LargeBodies
from gateway.errors import ApiError
from gateway.pooling.answers import EmbeddingsEndpoint

LARGE = LARGE_BYTES + 1
MAX_BODY = 4 << 20


def held(released: threading.Event) -> Callable[[], int]:
    """Return what reads until it is released, and then tells its thread."""

    def read() -> int:
        assert released.wait(10)
        return threading.get_ident()

    return read


async def test_small_body_is_read_at_once() -> None:
    assert await LargeBodies().read("t", LARGE_BYTES, threading.get_ident) == threading.get_ident()


async def test_large_body_is_read_beside_the_event_loop() -> None:
    released = threading.Event()
    reading = asyncio.ensure_future(LargeBodies().read("t", LARGE, held(released)))
    await asyncio.sleep(0.01)
    assert not reading.done()
    released.set()
    assert await reading != threading.get_ident()


async def test_error_of_a_large_body_is_told() -> None:
    def read() -> None:
        raise ApiError(400, "wrong")

    with pytest.raises(ApiError, match="wrong"):
        await LargeBodies().read("t", LARGE, read)


async def test_tenants_take_turns() -> None:
    """A tenant that sends many large bodies waits for itself."""
    bodies, released, order = LargeBodies(), threading.Event(), list[str]()

    def reader(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    first = asyncio.ensure_future(bodies.read("many", LARGE, held(released)))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(bodies.read("many", LARGE, reader("many"))) for _ in range(5)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(bodies.read("other", LARGE, reader("other")))
    await asyncio.sleep(0.01)
    released.set()
    await asyncio.gather(first, *waiting, other)
    assert order == ["other", *["many"] * 5]


async def test_tenant_whose_bodies_would_fill_the_memory_is_told_to_come_back() -> None:
    bodies, released = LargeBodies(), threading.Event()
    size = MAX_WAITING_BYTES // 4
    waiting = [asyncio.ensure_future(bodies.read("many", size, held(released))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refusal:
        await bodies.read("many", size, held(released))
    assert (refusal.value.status, refusal.value.code) == (429, "too_many_body_bytes")
    other = asyncio.ensure_future(bodies.read("other", size, held(released)))
    released.set()
    await asyncio.gather(*waiting, other)
    assert await bodies.read("many", MAX_WAITING_BYTES * 2, threading.get_ident)


async def test_body_that_is_not_waited_for_any_more_gives_its_place_back() -> None:
    bodies, released = LargeBodies(), threading.Event()
    reading = asyncio.ensure_future(bodies.read("t", MAX_WAITING_BYTES, held(released)))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    released.set()
    assert await bodies.read("t", MAX_WAITING_BYTES, threading.get_ident)


async def test_small_compressed_body_is_inflated_at_once_while_another_tenant_s_bodies_are_read() -> None:
    bodies, released = LargeBodies(), threading.Event()
    reading = asyncio.ensure_future(bodies.read("many", LARGE, held(released)))
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(bodies.inflated("other", gzip.compress(b"{}"), MAX_BODY), 5) == b"{}"
        assert not reading.done()
    finally:
        released.set()
        await reading


@pytest.mark.parametrize("data", [bytes(LARGE), random.Random(0).randbytes(20_000)], ids=["inflated", "compressed"])
async def test_body_that_takes_long_to_inflate_waits_for_its_turn(data: bytes) -> None:
    """Short to inflate are those that are small, compressed and inflated."""
    body = gzip.compress(data)
    bodies, released = LargeBodies(), threading.Event()
    reading = asyncio.ensure_future(bodies.read("other", LARGE, held(released)))
    await asyncio.sleep(0)
    inflating = asyncio.ensure_future(bodies.inflated("many", body, MAX_BODY))
    await asyncio.sleep(0.01)
    assert not inflating.done()
    released.set()
    await reading
    assert await inflating == data


async def test_bombs_of_a_tenant_count_as_what_they_become_before_they_are_inflated() -> None:
    bodies, released, bomb = LargeBodies(), threading.Event(), gzip.compress(bytes(2 * MAX_BODY))
    reading = asyncio.ensure_future(bodies.read("other", LARGE, held(released)))
    await asyncio.sleep(0)
    inflating = [asyncio.ensure_future(bodies.inflated("many", bomb, MAX_BODY)) for _ in range(100)]
    await asyncio.sleep(0)
    refused = [task for task in inflating if task.done()]
    assert len(inflating) - len(refused) == MAX_WAITING_BYTES // MAX_BODY - 1
    assert all(isinstance(error := task.exception(), ApiError) and error.status == 429 for task in refused)
    released.set()
    await asyncio.wait([reading, *inflating])
    assert {task.exception().status for task in inflating} == {413, 429}  # type: ignore[union-attr]


async def test_body_waits_for_no_thread_that_others_hold() -> None:
    released = threading.Event()
    others = [asyncio.ensure_future(asyncio.to_thread(held(released))) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(LargeBodies().read("t", LARGE, threading.get_ident), 5)
    finally:
        released.set()
        await asyncio.gather(*others)


PARTS = [{"type": "text", "text": "x"}] * 30
TURNS = [{"role": "user", "content": PARTS}] * 4096


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (ChatEndpoint, {"model": "m", "messages": TURNS}),
        (MessagesEndpoint, {"model": "m", "max_tokens": 1, "messages": TURNS}),
        (CompletionEndpoint, {"model": "m", "prompt": ["x"] * 100_000}),
        (EmbeddingsEndpoint, {"model": "m", "input": [["x"]] * 100_000}),
    ],
)
async def test_loop_goes_on_while_a_body_of_a_hundred_thousand_parts_is_read(
    endpoint: Callable[..., Endpoint], body: dict[str, object]
) -> None:
    payload, looks = msgspec.json.encode(body), 0
    bodies = LargeBodies()
    reading = asyncio.ensure_future(endpoint(bodies).generation(payload, Principal("key", "t")))
    while not reading.done():
        await asyncio.sleep(0)
        looks += 1
    assert looks > 2
    assert reading.exception() is None or isinstance(reading.exception(), ApiError)
