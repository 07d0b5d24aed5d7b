"""Images on their way in: their limits, each one clear error, and what is stored for whom."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from gateway.api.schemas.images import image_of
from gateway.errors import ApiError
from gateway.generation import Generation, ImageSource, Prompt
from gateway.media import intake as intake_module
from gateway.media.intake import ImageIntake, ImageLimits
from shared.image_header import read_header
from shared.media import MediaRef
from shared.media_store import BATCH_TTL_S, INTERACTIVE_TTL_S, MediaFullError, MediaStoreError
from shared.sampling import Sampling
from tests.images import encoded, picture, turned
from tests.waiting import until

PNG = encoded(picture())


class Parts:
    """A store and hosts."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, bytes, float]] = []
        self.error: Exception | None = None
        self.may_store = asyncio.Event()
        self.may_store.set()

    async def put(self, tenant: str, data: bytes, ttl_s: float) -> bytes:
        if self.error is not None:
            raise self.error
        await self.may_store.wait()
        self.stored.append((tenant, data, ttl_s))
        return hashlib.sha256(data).digest()

    async def fetch(self, tenant: str, url: str, where: str) -> bytes:
        return {"https://x/turned": turned(picture(), 6), "https://x/text": b"<html>", "https://x/png": PNG}[url]


@pytest.fixture
def parts() -> Parts:
    return Parts()


def intake(parts: Parts, **limits: int) -> ImageIntake:
    return ImageIntake(parts, ImageLimits(**limits), parts)  # type: ignore[arg-type]


def source(place: int = 0, **fields: Any) -> ImageSource:
    return ImageSource(**{"where": f"messages.[0].content.[{place}]", "data": PNG, **fields})


def generation(*images: ImageSource, **fields: Any) -> Generation:
    return Generation("chat", "m", (Prompt(1, messages=(), images=images),), 1, Sampling(), False, **fields)


async def test_images_are_stored_for_their_tenant_and_named_by_digest(parts: Parts) -> None:
    stored = await intake(parts).stored(
        generation(source(detail="low"), source(url="https://x/turned", data=None)), "t"
    )
    (prompt,) = stored.prompts
    jpeg = turned(picture(), 6)
    assert prompt.images == ()
    assert prompt.media == (
        MediaRef(
            digest=hashlib.sha256(PNG).digest(),
            num_bytes=len(PNG),
            width=40,
            height=30,
            mime="image/png",
            detail="low",
        ),
        MediaRef(digest=hashlib.sha256(jpeg).digest(), num_bytes=len(jpeg), width=30, height=40, mime="image/jpeg"),
    )
    assert parts.stored == [("t", PNG, INTERACTIVE_TTL_S), ("t", jpeg, INTERACTIVE_TTL_S)]


async def test_bytes_that_are_stored_are_let_go_of(parts: Parts) -> None:
    """Whoever takes note of the request keeps it for as long as its answer takes."""
    asked = generation(source())
    await intake(parts).stored(asked, "t")
    assert [image.data for image in asked.prompts[0].images] == [None]


async def test_images_of_jobs_are_kept_for_longer(parts: Parts) -> None:
    await intake(parts).stored(generation(source(), lane="batch"), "t")
    assert parts.stored == [("t", PNG, BATCH_TTL_S)]


async def test_what_is_only_counted_is_not_stored(parts: Parts) -> None:
    (ref,) = await intake(parts).references([source()], "t")
    assert (ref.digest, parts.stored) == (hashlib.sha256(PNG).digest(), [])


async def test_image_of_the_body_is_measured_once_and_stored_when_it_stays(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for the part of a conversation that fits counts it many times."""
    headers = Mock(wraps=read_header)
    monkeypatch.setattr("gateway.media.intake.read_header", headers)
    images, image = intake(parts), source()
    measured = [await images.measured(image, "t", 60.0) for _ in range(3)]
    assert (headers.call_count, parts.stored) == (1, [])
    kept = (await images.stored(generation(image), "t")).prompts[0].media
    assert [*measured, *kept] == [measured[0]] * 4
    assert [data for _, data, _ in parts.stored] == [PNG]


@pytest.mark.parametrize(
    ("limits", "images", "place", "problem"),
    [
        ({"max_bytes": len(PNG) - 1}, [source()], 0, f"has {len(PNG)} bytes; at most {len(PNG) - 1} are read"),
        ({"max_pixels": 1199}, [source()], 0, "has 40x30 pixels; at most 1199 are read"),
        ({"max_images": 2}, [source(0), source(1), source(2)], 2, "The request has 3 images; at most 2 are read"),
        ({"max_images": 0}, [source(0)], 0, r"is an image, and this server reads none \(--max-images 0\)"),
        ({"max_total_pixels": 2000}, [source(0), source(1)], 1, "have 2400 pixels together; at most 2000 are read"),
        ({}, [source(url="https://x/text", data=None)], 0, "is not a PNG, JPEG, WebP or GIF"),
        ({}, [source(file_id="file-1", data=None)], 0, "this gateway has no store of files"),
    ],
)
async def test_each_limit_is_one_error_that_names_image_and_limit(
    parts: Parts, limits: dict[str, int], images: list[ImageSource], place: int, problem: str
) -> None:
    with pytest.raises(ApiError, match=problem) as e:
        await intake(parts, **limits).references(images, "t", 1.0)
    assert (e.value.status, e.value.param) == (400, f"messages.[0].content.[{place}]")


async def read_file(tenant: str, file_id: str, admit: Callable[[int], None]) -> bytes | None:
    if tenant == "other":
        return None
    admit(len(PNG))
    return PNG


async def test_files_are_read_for_their_tenant(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    images = intake(parts)
    images.read_file = read_file
    asked = [source(file_id="file-1", data=None)]
    (ref,) = await images.references(asked, "t", 1.0)
    assert ref.num_bytes == len(PNG)
    with pytest.raises(ApiError, match="is not a file of this tenant: 'file-1'"):
        await images.references(asked, "other", 1.0)
    small = intake(parts, max_bytes=len(PNG) - 1)
    small.read_file = read_file
    with pytest.raises(ApiError, match=f"is a file of {len(PNG)} bytes; at most") as e:
        await small.references(asked, "t", 1.0)
    assert (e.value.param, e.value.code) == ("messages.[0].content.[0]", "image_too_large")
    # A 503 would ask the client to try again with an image that is always too large.
    monkeypatch.setattr(intake_module, "MAX_HELD_BYTES", 1)
    small = intake(parts, max_bytes=len(PNG) - 1)
    small.read_file = read_file
    with pytest.raises(ApiError) as e:
        await small.stored(generation(*asked), "t")
    assert e.value.code == "image_too_large"


@pytest.mark.parametrize("given", [{}, {"file_id": "file-1", "data": None}, {"url": "https://x/png", "data": None}])
async def test_bytes_that_wait_to_be_stored_are_bounded_and_leave_room_for_others(
    parts: Parts, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "MAX_HELD_BYTES", 4 * len(PNG))
    images = intake(parts)
    images.read_file = read_file
    parts.may_store.clear()
    asking = [asyncio.create_task(images.stored(generation(source(**given)), "many")) for _ in range(2)]
    await until(lambda: images._held.used == 2 * len(PNG))
    with pytest.raises(ApiError, match="Too many bytes of images") as e:
        await images.stored(generation(source(**given)), "many")
    assert (e.value.status, e.value.code, e.value.retry_after_s) == (503, "too_many_image_bytes", 1.0)
    asking.append(asyncio.create_task(images.stored(generation(source(**given)), "few")))
    await until(lambda: images._held.used == 3 * len(PNG))
    parts.may_store.set()
    await asyncio.gather(*asking)
    assert images._held.used == 0


async def test_many_images_of_one_tenant_keep_no_other_waiting(parts: Parts) -> None:
    images, may_read, order = intake(parts), asyncio.Event(), list[str]()

    async def read(tenant: str, file_id: str, admit: Callable[[int], None]) -> bytes | None:
        if tenant == "many":
            await may_read.wait()
        order.append(tenant)
        return PNG

    images.read_file = read
    asked = [source(file_id="file-1", data=None)]
    many = [asyncio.create_task(images.references(asked, "many", 1.0)) for _ in range(20)]
    await asyncio.sleep(0)
    for tenant in ("few", "other", "few"):
        await asyncio.wait_for(images.references(asked, tenant, 1.0), 60)
    assert order == ["few", "other", "few"]
    may_read.set()
    await asyncio.gather(*many)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MediaFullError("full", is_own=True), 429, "image_quota_exceeded"),
        (MediaFullError("full", is_own=False), 503, "image_store_full"),
        (MediaStoreError("away"), 503, "image_store_unavailable"),
    ],
)
async def test_store_that_takes_nothing_is_an_honest_answer(
    parts: Parts, error: Exception, status: int, code: str
) -> None:
    parts.error = error
    with pytest.raises(ApiError) as e:
        await intake(parts).references([source()], "t", 1.0)
    assert (e.value.status, e.value.code) == (status, code)
    assert e.value.retry_after_s is not None


async def test_store_that_cannot_be_used_is_logged_once_a_minute(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    parts.error, images = MediaStoreError("the stream HR_MEDIA does not exist"), intake(parts)
    for _ in range(3):
        with pytest.raises(ApiError):
            await images.references([source()], "t", 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "images cannot be stored: the stream HR_MEDIA does not exist"
    ]


def test_pixels_of_an_image_in_the_body_are_known_at_once() -> None:
    import base64

    image = image_of(base64.b64encode(PNG).decode(), None, "x")
    assert msgspec.structs.asdict(image)["num_pixels"] == 1200
