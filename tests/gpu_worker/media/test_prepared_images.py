"""Images on their way to the engine: one at a time each, tenants in turns, within the memory that there is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from gpu_worker.media import prepared_images
from gpu_worker.media.decoder import SlowImageError
from gpu_worker.media.prepared_images import MAX_SLOW_REQUESTS, QUICK_CPU_S, ImagesBusyError, PreparedImages
from shared.errors import BadRequestError
from shared.media import MediaRef
from shared.media_store import MissingMediaError
from tests.waiting import until

SIDE = 10
LATE = 99
IMAGE_BYTES = 3 * SIDE * SIDE


def ref(number: int, side: int = SIDE) -> MediaRef:
    return MediaRef(digest=bytes([number] * 32), num_bytes=5, width=side, height=side, mime="image/png")


@dataclass(eq=False)
class Prepared:
    digest: bytes
    values: Any


class Preparer:
    """Makes images of a side of at least `side` pixels."""

    side = 0

    def prepared_bytes(self, ref: MediaRef) -> int:
        return 3 * self.side**2

    def prepare(self, ref: MediaRef, pixels: Any) -> Prepared:
        return Prepared(ref.digest, pixels)


class Parts:
    """A store and a decoder that do what the test lets them."""

    def __init__(self) -> None:
        self.fetched: list[tuple[str, int]] = []
        self.decoded: list[int] = []
        self.seconds: dict[int, float] = {}
        self.is_closed = False
        self.slow: Container[int] = ()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.slow_may_go_on = asyncio.Event()

    async def get(self, tenant: str, ref: MediaRef) -> bytes:
        self.fetched.append((tenant, ref.digest[0]))
        await self.may_go_on.wait()
        for _ in range(5):  # as many turns of the loop as a reply of NATS takes, at least
            await asyncio.sleep(0)
        if ref.digest[0] == 0:
            raise MissingMediaError("It is no longer stored.")
        return b"bytes"

    async def decode(self, ref: MediaRef, data: bytes, cpu_s: float) -> Any:
        self.decoded.append(ref.digest[0])
        if ref.digest[0] in self.slow:
            if cpu_s == QUICK_CPU_S:
                raise SlowImageError
            await self.slow_may_go_on.wait()
        await asyncio.sleep(self.seconds.get(ref.digest[0], 0.0))
        if ref.digest[0] == LATE:
            raise BadRequestError("The image takes more than 10 s to be decoded.", "media", "invalid_image")
        return np.full((ref.height, ref.width, 3), ref.digest[0], np.uint8)

    async def close(self) -> None:
        self.is_closed = True
        self.may_go_on.set()


@pytest.fixture
async def parts() -> Parts:
    return Parts()


@pytest.fixture
async def images(parts: Parts) -> AsyncIterator[PreparedImages]:
    images = PreparedImages(parts, Preparer(), 4 * IMAGE_BYTES, parts)  # type: ignore[arg-type]
    yield images
    await images.close()


def one_at_a_time(images: PreparedImages, num_images: int) -> None:
    """Let images be worked on one by one, whoever's they are, with room for many."""
    images._places.capacity, images._places._kept_free = 1, 0
    images._room.capacity = num_images * IMAGE_BYTES


async def test_images_come_in_their_order_each_fetched_once(images: PreparedImages, parts: Parts) -> None:
    images._room.capacity *= 2
    parts.may_go_on.clear()
    asking = [asyncio.create_task(images.images("t", [ref(2), ref(1), ref(2)])) for _ in range(2)]
    await until(lambda: len(parts.fetched) >= min(2, prepared_images.MAX_AT_ONCE))
    parts.may_go_on.set()
    for found in await asyncio.gather(*asking):
        assert [each.values[0, 0, 0] for each in found] == [2, 1, 2]
    assert sorted(parts.fetched) == [("t", 1), ("t", 2)]
    # The next turn of the conversation needs nothing anew; another tenant's request does.
    await images.images("t", [ref(2)])
    await images.images("other", [ref(2)])
    assert sorted(parts.fetched) == [("other", 2), ("t", 1), ("t", 2)]


async def test_image_that_is_missing_is_the_fault_of_the_request(
    images: PreparedImages, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadRequestError, match=r"^Image 2 of 2: .*no longer stored") as e:
        await images.images("t", [ref(1), ref(0)])
    assert not caplog.records, "what is wrong with a request is not an error of the worker"
    assert (e.value.param, e.value.code) == ("media.[1]", "image_not_found")


async def test_what_was_checked_for_one_reference_is_checked_again_for_another(
    images: PreparedImages, parts: Parts
) -> None:
    images._room.capacity *= 2
    parts.may_go_on.clear()
    lie = structs.replace(ref(1), width=SIDE // 2, height=2 * SIDE)
    lying = asyncio.create_task(images.images("t", [lie]))
    honest = asyncio.create_task(images.images("t", [ref(1)]))
    await asyncio.sleep(0)
    parts.may_go_on.set()
    (found,) = await honest
    assert found.values.shape == (SIDE, SIDE, 3)
    assert (await lying)[0].values.shape == (2 * SIDE, SIDE // 2, 3)
    # Nor is it taken from what was prepared lately.
    await images.images("t", [structs.replace(ref(1), mime="image/gif")])
    assert parts.fetched == [("t", 1)] * 3


async def test_request_that_left_is_not_worked_on(images: PreparedImages, parts: Parts) -> None:
    with pytest.raises(asyncio.CancelledError):
        await images.images("t", [ref(1)], lambda: False)
    assert parts.fetched == []


async def test_close_ends_what_is_worked_on_and_the_decoder(images: PreparedImages, parts: Parts) -> None:
    parts.may_go_on.clear()
    asking = asyncio.create_task(images.images("t", [ref(1)]))
    await until(lambda: parts.fetched)
    (work,) = images._running.values()
    await images.close()
    assert (work.task.cancelled(), parts.is_closed) == (True, True)
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_tenants_take_turns(images: PreparedImages, parts: Parts) -> None:
    one_at_a_time(images, 100)
    parts.may_go_on.clear()
    many = asyncio.create_task(images.images("many", [ref(number) for number in range(1, 20)]))
    await until(lambda: len(parts.fetched) == 1)
    few = asyncio.create_task(images.images("few", [ref(50)]))
    await asyncio.sleep(0)
    parts.may_go_on.set()
    await few
    assert len(parts.fetched) < 5
    await many


async def test_tenant_whose_images_took_long_lets_others_pass(images: PreparedImages, parts: Parts) -> None:
    one_at_a_time(images, 1000)
    parts.seconds = {1: 0.05}
    slow = asyncio.create_task(images.images("slow", [ref(number) for number in range(1, 20)]))
    await until(lambda: parts.decoded)
    quick = asyncio.create_task(images.images("quick", [ref(number) for number in range(50, 60)]))
    await quick
    # Ten images took less than the first of the other tenant's.
    assert parts.decoded[:11] == [1, *range(50, 60)]
    await slow


async def test_another_tenants_image_is_begun_beside_those_that_take_long(images: PreparedImages, parts: Parts) -> None:
    images._room.capacity = 1000 * IMAGE_BYTES
    parts.may_go_on.clear()
    slow = asyncio.create_task(images.images("slow", [ref(number) for number in range(1, 20)]))
    await until(lambda: len(parts.fetched) == prepared_images.MAX_AT_ONCE)
    quick = asyncio.create_task(images.images("quick", [ref(50)]))
    await until(lambda: ("quick", 50) in parts.fetched)
    assert len(parts.fetched) == prepared_images.MAX_AT_ONCE + 1
    parts.may_go_on.set()
    await asyncio.gather(quick, slow)


async def test_one_tenant_leaves_room_for_others(images: PreparedImages, parts: Parts) -> None:
    images._room.capacity = 12 * IMAGE_BYTES
    parts.may_go_on.clear()

    async def ask(number: int) -> None:
        await images.images("many", [ref(number), ref(number + 50)])

    asking = [asyncio.create_task(ask(number)) for number in range(1, 9)]
    await asyncio.sleep(0)
    # Six of twelve: those that wait for room are not begun.
    assert {key.digest[0] for _, key in images._running} == {1, 2, 3, 51, 52, 53}
    few = asyncio.create_task(images.images("few", [ref(200)]))
    await until(lambda: ("few", ref(200)) in images._running)
    parts.may_go_on.set()
    await few
    await asyncio.gather(*asking)


async def test_images_that_take_long_leave_their_places_and_the_memory_to_others(
    images: PreparedImages, parts: Parts
) -> None:
    """Many tenants send nothing else, and more than the memory holds."""
    parts.slow = range(100, 200)
    slow = [asyncio.create_task(images.images(f"t{number % 10}", [ref(100 + number)])) for number in range(60)]
    await until(lambda: {*parts.decoded} == {*range(100, 160)})
    for number in range(1, 33):
        assert len(await images.images("other", [ref(number), ref(number + 40)])) == 2
    parts.slow_may_go_on.set()
    assert {found[0].values[0, 0, 0] for found in await asyncio.gather(*slow)} == {*range(100, 160)}
    await until(lambda: not images._running)
    assert (len(images._num_slow), images._slow_places._used, images._places._used) == (0, 0, 0)


async def test_large_slow_image_has_its_turn_beside_a_tenant_that_always_has_some(
    images: PreparedImages, parts: Parts
) -> None:
    images._room.capacity = 20 * IMAGE_BYTES
    parts.slow, parts.seconds = range(1, 200), dict.fromkeys(range(1, 99), 0.01)
    parts.slow_may_go_on.set()
    numbers = iter(range(1, 99))

    async def flood() -> None:
        while True:
            await images.images("many", [ref(next(numbers))])

    flooding = [asyncio.create_task(flood()) for _ in range(2)]
    await until(lambda: len(parts.decoded) >= 8)
    for large in (100, 101, 102):
        began = len(parts.decoded)
        (found,) = await images.images("few", [ref(large, 2 * SIDE)])
        assert found.values.shape == (2 * SIDE, 2 * SIDE, 3)
        # Its first second, and its turn; between them the other tenant begins those that it had waiting.
        assert parts.decoded[began:].count(large) == 2
        assert len(parts.decoded) - began <= 8
    for task in flooding:
        task.cancel()
    await asyncio.gather(*flooding, return_exceptions=True)


async def test_tenant_has_a_bounded_number_of_requests_with_slow_images(images: PreparedImages, parts: Parts) -> None:
    """However many such images each of them has."""
    images._room.capacity = 100 * IMAGE_BYTES
    parts.slow = range(100, 250)
    waiting = [
        asyncio.create_task(images.images("many", [ref(100 + 3 * n + place) for place in range(3)]))
        for n in range(MAX_SLOW_REQUESTS)
    ]
    await until(lambda: sum(map(len, images._num_slow.values())) == MAX_SLOW_REQUESTS)
    for _ in range(2):
        with pytest.raises(ImagesBusyError, match=f"{MAX_SLOW_REQUESTS} of your requests wait"):
            await images.images("many", [ref(200)])
    assert parts.decoded.count(200) == 1, "an image that was slow once has no second first second"
    few = asyncio.create_task(images.images("few", [ref(200)]))
    parts.slow_may_go_on.set()
    assert len(await few) == 1
    assert [len(found) for found in await asyncio.gather(*waiting)] == [3] * MAX_SLOW_REQUESTS
    assert len(await images.images("many", [ref(200)])) == 1


async def test_requests_for_the_same_slow_image_give_all_their_room_back(images: PreparedImages, parts: Parts) -> None:
    parts.slow = [1]
    asking = [asyncio.create_task(images.images("t", [ref(1)])) for _ in range(3)]
    await until(lambda: parts.decoded == [1, 1])
    asking.append(asyncio.create_task(images.images("t", [ref(1)])))
    await asyncio.sleep(0)
    parts.slow_may_go_on.set()
    for found in await asyncio.gather(*asking):
        assert found[0].values[0, 0, 0] == 1
    await until(lambda: images._room._used == IMAGE_BYTES)


async def test_image_that_the_model_enlarges_has_room_for_what_it_becomes(
    images: PreparedImages, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preparer, "side", 2 * SIDE)
    parts.may_go_on.clear()

    async def ask(tenant: str) -> None:
        await images.images(tenant, [ref(1)])

    asking = [asyncio.create_task(ask(tenant)) for tenant in ("a", "b")]
    await until(lambda: parts.fetched)
    assert len(images._running) == 1
    with pytest.raises(BadRequestError, match=r"have 800 pixels together .*; this worker reads 400 at most"):
        await images.images("c", [ref(1), ref(2)])
    parts.may_go_on.set()
    await asyncio.gather(*asking)


async def test_slow_image_that_nobody_wants_any_more_is_not_begun_again(images: PreparedImages, parts: Parts) -> None:
    parts.slow = [1, 2]
    first = asyncio.create_task(images.images("t", [ref(1)]))
    await until(lambda: parts.decoded == [1, 1])
    leaving = asyncio.create_task(images.images("t", [ref(2)]))
    await until(lambda: parts.decoded == [1, 1, 2])
    await asyncio.sleep(0)
    leaving.cancel()
    parts.slow_may_go_on.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert parts.decoded == [1, 1, 2]


async def test_image_that_nobody_wants_any_more_is_not_begun(images: PreparedImages, parts: Parts) -> None:
    one_at_a_time(images, 100)
    wanted, parts.seconds = {"first": True, "second": True}, {1: 0.05}
    asking = [
        asyncio.create_task(images.images("t", [ref(1), ref(2), ref(3)], lambda: wanted["first"])),
        asyncio.create_task(images.images("t", [ref(3)], lambda: wanted["second"])),
    ]
    await until(lambda: parts.decoded)
    wanted["first"] = False
    await asking[1]
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    # Somebody else waits for the third.
    assert (parts.fetched, parts.decoded) == ([("t", 1), ("t", 3)], [1, 3])
    assert not images._room._held["t"] - sum(kept.values.nbytes for kept in images._kept.values())


async def test_image_that_is_unwanted_once_fetched_is_not_decoded(images: PreparedImages, parts: Parts) -> None:
    wanted = [True]
    parts.may_go_on.clear()
    asking = asyncio.create_task(images.images("t", [ref(1)], lambda: wanted[0]))
    await until(lambda: parts.fetched)
    wanted[0] = False
    parts.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert parts.decoded == []


async def test_after_an_image_over_its_limit_the_rest_of_its_request_is_not_decoded(
    images: PreparedImages, parts: Parts
) -> None:
    one_at_a_time(images, 100)
    asking = asyncio.create_task(images.images("t", [ref(LATE), *map(ref, range(1, 9))]))
    with pytest.raises(BadRequestError, match=r"^Image 1 of 9: The image takes more than 10 s"):
        await asking
    assert len(await images.images("t", [ref(20)])) == 1
    assert parts.decoded == [LATE, 20]


async def test_requests_wait_for_room_and_get_it_when_the_engine_lets_go(images: PreparedImages, parts: Parts) -> None:
    held = await images.images("t", [ref(number) for number in range(1, 5)])
    asking = asyncio.create_task(images.images("t", [ref(9), ref(10)]))
    later = asyncio.create_task(images.images("other", [ref(11)]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(parts.fetched) == 4
    del held
    gc.collect()
    assert [each.values[0, 0, 0] for each in await asking] == [9, 10]
    await later


async def test_images_that_are_only_kept_make_no_other_tenant_wait(images: PreparedImages) -> None:
    for number in range(1, 4):
        await images.images("other", [ref(number)])
    held = await images.images("t", [ref(8)])
    held += await images.images("t", [ref(9)])
    assert len(held) == 2


async def test_engine_may_let_go_in_its_own_thread(images: PreparedImages) -> None:
    held: list[Any] = await images.images("t", [ref(number) for number in range(1, 5)])
    asking = asyncio.create_task(images.images("t", [ref(9)]))
    await asyncio.sleep(0)
    await asyncio.to_thread(held.clear)
    assert len(await asking) == 1


async def test_more_pixels_than_the_memory_holds_are_refused_with_the_limit(images: PreparedImages) -> None:
    with pytest.raises(BadRequestError, match=r"have 500 pixels together .*; this worker reads 400 at most"):
        await images.images("t", [ref(number) for number in range(1, 6)])
    # The same image twice counts once.
    assert len(await images.images("t", [ref(1)] * 9)) == 9


async def test_caller_that_leaves_while_it_waits_keeps_no_room(images: PreparedImages) -> None:
    held = await images.images("t", [ref(number) for number in range(1, 5)])
    leaving = asyncio.create_task(images.images("t", [ref(5)]))
    staying = asyncio.create_task(images.images("t", [ref(6)]))
    await asyncio.sleep(0)
    leaving.cancel()
    del held
    gc.collect()
    assert len(await staying) == 1
