"""Images in JetStream: by digest, for their tenant alone, within a share, and no longer than they are needed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from shared import media_store
from shared.media import MediaRef
from shared.media_store import PIECE_BYTES, UNIT_BYTES, MediaFullError, MediaStore, MediaStoreError, MissingMediaError
from shared.nats_connection import connect
from shared.streams import MEDIA_STREAM, StreamLimits, ensure_record_streams
from shared.subjects import media_subject
from tests.servers import NatsServer
from tests.waiting import until


@dataclass
class Place:
    server: NatsServer
    nats: Client
    js: JetStreamContext


@pytest.fixture
async def place(start_nats: Callable[..., NatsServer]) -> AsyncIterator[Place]:
    server = start_nats()
    nats = await connect(server.url, role="gateway", name="g")
    js = nats.jetstream(timeout=2)
    await ensure_record_streams(js, StreamLimits(media_max_bytes=8 << 20))
    yield Place(server, nats, js)
    await nats.close()


def ref(data: bytes, **fields: int) -> MediaRef:
    digest = hashlib.sha256(data).digest()
    whole = {"num_bytes": len(data), "width": 1, "height": 1, **fields}
    return MediaRef(digest=digest, mime="image/png", **whole)


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
async def test_image_is_read_as_it_was_stored_by_its_tenant_alone(place: Place, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    assert await MediaStore(place.js).put("t", data) == hashlib.sha256(data).digest()
    reader = MediaStore(place.js)
    assert await reader.get("t", ref(data)) == data
    with pytest.raises(MissingMediaError, match="no longer stored"):
        await reader.get("other", ref(data))


async def test_image_is_stored_once_while_it_is_there_for_long_enough(place: Place) -> None:
    store = MediaStore(place.js)
    for _ in range(3):
        await store.put("t", b"image")
    assert (await place.js.stream_info(MEDIA_STREAM)).state.last_seq == 2
    await store.put("t", b"image", media_store.BATCH_TTL_S)
    await store.put("other", b"image")
    state = (await place.js.stream_info(MEDIA_STREAM)).state
    assert (state.last_seq, state.messages) == (7, 5)


async def test_what_is_something_else_is_refused(place: Place) -> None:
    store = MediaStore(place.js)
    await store.put("t", b"image")
    with pytest.raises(MissingMediaError, match="another length or digest"):
        await store.get("t", ref(b"image", num_bytes=4))
    await place.js.publish(media_subject("t", ref(b"image").digest, 0), b"other")
    with pytest.raises(MissingMediaError, match="another length or digest"):
        await store.get("t", ref(b"image"))


async def test_image_expires(place: Place) -> None:
    store = MediaStore(place.js)
    await store.put("t", b"image", ttl_s=1.0)
    async with asyncio.timeout(20):
        while (await place.js.stream_info(MEDIA_STREAM)).state.messages:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.05)
    with pytest.raises(MissingMediaError):
        await store.get("t", ref(b"image"))


async def test_tenant_has_its_share_and_no_more(place: Place) -> None:
    store = MediaStore(place.js, tenant_bytes=2 * PIECE_BYTES)
    await store.put("t", bytes(2 * PIECE_BYTES - 1))
    with pytest.raises(MediaFullError, match="fill its share of the store: 1024 KB of at most 1024"):
        await store.put("t", b"one more")
    await store.put("other", b"one more")
    # Another process counts what this one has stored.
    with pytest.raises(MediaFullError, match="--media-tenant-bytes"):
        await MediaStore(place.js, tenant_bytes=2 * PIECE_BYTES).put("t", b"one more")


async def test_small_images_count_as_their_bytes_and_those_of_earlier_gateways_as_pieces(place: Place) -> None:
    earlier = b"of an earlier gateway"
    await place.js.publish(media_subject("t", ref(earlier).digest, 0), earlier)
    store = MediaStore(place.js, tenant_bytes=2 * PIECE_BYTES)
    for number in range(PIECE_BYTES // UNIT_BYTES):
        await store.put("t", bytes([number]) * 400)
    with pytest.raises(MediaFullError, match="1024 KB of at most 1024"):
        await store.put("t", b"one more")
    # Storing it again tells its size.
    await store.put("t", earlier)
    await store.put("t", b"one more")
    assert await store.get("t", ref(earlier)) == earlier


async def test_full_store_refuses_and_keeps_what_it_has(place: Place) -> None:
    store = MediaStore(place.js)
    first = bytes(4 << 20)
    await store.put("t", first)
    with pytest.raises(MediaFullError, match="is full"):
        await store.put("other", bytes(5 << 20))
    assert await store.get("t", ref(first)) == first


@pytest.mark.parametrize("tenant_bytes", [0, 8 << 20])
async def test_store_that_does_not_exist_names_its_stream_and_what_makes_it(place: Place, tenant_bytes: int) -> None:
    store = MediaStore(place.js, tenant_bytes)
    await place.js.delete_stream(MEDIA_STREAM)
    with pytest.raises(MediaStoreError, match="HR_MEDIA does not exist; run `headrace setup`"):
        await store.put("t", b"image")


async def test_store_that_does_not_answer_is_told_apart(place: Place) -> None:
    place.server.kill()
    with pytest.raises(MediaStoreError, match="does not answer"):
        await MediaStore(place.nats.jetstream(timeout=0.1)).put("t", b"image")
    place.server.start()
    await until(lambda: place.nats.is_connected)


async def life(place: Place, data: bytes) -> float:
    """Return for how long an image is stored, by the server's own headers."""
    digest = hashlib.sha256(data).digest()
    headers = (await place.js.get_last_msg(MEDIA_STREAM, media_subject("t", digest, 0))).headers
    return float((headers or {})["Nats-TTL"])


async def test_shorter_life_never_replaces_a_longer_one(place: Place) -> None:
    first, second = bytes(PIECE_BYTES + 1), b"image"
    for data in (first, second):
        await MediaStore(place.js).put("t", data, media_store.BATCH_TTL_S)
        await MediaStore(place.js).put("t", data)
        assert await life(place, data) == media_store.BATCH_TTL_S
        # Not even where a part was lost.
        await place.js.purge_stream(MEDIA_STREAM, subject=media_subject("t", hashlib.sha256(data).digest(), 0))
        await MediaStore(place.js).put("t", data)
        assert await life(place, data) == media_store.BATCH_TTL_S
    await MediaStore(place.js).put("t", b"short")
    await MediaStore(place.js).put("t", b"short", media_store.BATCH_TTL_S)
    assert await life(place, b"short") == media_store.BATCH_TTL_S
    # Lines of a batch are published again: they keep nothing from a job that is not.
    for own, kept in ((media_store.LINE_TTL_S,) * 2, (media_store.BATCH_TTL_S,) * 2):
        await MediaStore(place.js).put("t", b"line", own)
        assert await life(place, b"line") == kept
    await MediaStore(place.js).put("t", b"line", media_store.LINE_TTL_S)
    assert await life(place, b"line") == media_store.BATCH_TTL_S


async def test_longer_life_that_comes_amid_a_shorter_one_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    short, put_all = MediaStore(place.js), MediaStore._put_all
    came = []

    async def after_a_batch(self: MediaStore, pieces: dict[str, bytes], ttl_s: float) -> None:
        if self is short and not came:
            came.append(await MediaStore(place.js).put("t", b"image", media_store.BATCH_TTL_S))
        await put_all(self, pieces, ttl_s)

    monkeypatch.setattr(MediaStore, "_put_all", after_a_batch)
    await short.put("t", b"image")
    assert came
    assert await life(place, b"image") == media_store.BATCH_TTL_S


async def test_image_that_a_worker_did_not_find_is_stored_again(place: Place) -> None:
    store = MediaStore(place.js)
    await store.put("t", b"image")
    await place.js.purge_stream(MEDIA_STREAM)
    store.forget("t", hashlib.sha256(b"image").digest())
    await store.put("t", b"image")
    assert await store.get("t", ref(b"image")) == b"image"


async def test_nothing_is_believed_of_another_stream_nor_after_a_reconnect(place: Place) -> None:
    reconnects = [0]
    store = MediaStore(place.js, num_reconnects=lambda: reconnects[0])
    await store.put("t", b"image")
    await place.js.purge_stream(MEDIA_STREAM)
    reconnects[0] += 1
    await store.put("t", b"image")
    assert await store.get("t", ref(b"image")) == b"image"
    await place.js.delete_stream(MEDIA_STREAM)
    await ensure_record_streams(place.js, StreamLimits(media_max_bytes=8 << 20))
    await store.put("t", b"another")
    await store.put("t", b"image")
    assert await store.get("t", ref(b"image")) == b"image"


async def test_share_is_taken_before_anything_is_stored(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store, may_go_on, put_all = MediaStore(place.js, tenant_bytes=3 * UNIT_BYTES), asyncio.Event(), MediaStore._put_all

    async def later(self: MediaStore, pieces: dict[str, bytes], ttl_s: float) -> None:
        await may_go_on.wait()
        await put_all(self, pieces, ttl_s)

    monkeypatch.setattr(MediaStore, "_put_all", later)
    puts = [asyncio.create_task(store.put("t", bytes([n]) * 1000)) for n in range(20)]
    await until(lambda: sum(put.done() for put in puts) == 17, timeout_s=10)
    may_go_on.set()
    ends = await asyncio.gather(*puts, return_exceptions=True)
    assert sum(isinstance(end, MediaFullError) for end in ends) == 17
    assert (await place.js.stream_info(MEDIA_STREAM)).state.messages == 6


async def test_some_tenants_never_fill_the_store_for_all(place: Place) -> None:
    store = MediaStore(place.js, tenant_bytes=16 * PIECE_BYTES)
    for tenant in ("a", "b"):
        puts = [store.put(tenant, bytes([n]) * PIECE_BYTES) for n in range(16)]
        ends = await asyncio.gather(*puts, return_exceptions=True)
        assert any(isinstance(end, MediaFullError) and end.is_own for end in ends)
    data = bytes(2 * PIECE_BYTES)
    await store.put("other", data)
    assert await store.get("other", ref(data)) == data
