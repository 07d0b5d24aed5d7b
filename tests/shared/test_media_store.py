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
from shared.media_store import PIECE_BYTES, MediaFullError, MediaStore, MediaStoreError, MissingMediaError
from shared.nats_connection import connect
from shared.streams import MEDIA_STREAM, StreamLimits, ensure_record_streams
from shared.subjects import media_subject
from tests.servers import NatsServer


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
    assert (await place.js.stream_info(MEDIA_STREAM)).state.last_seq == 1
    await store.put("t", b"image", media_store.BATCH_TTL_S)
    await store.put("other", b"image")
    state = (await place.js.stream_info(MEDIA_STREAM)).state
    assert (state.last_seq, state.messages) == (3, 2)


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
    await store.put("t", bytes(PIECE_BYTES + 1))
    with pytest.raises(MediaFullError, match="fill its share of the store, 1 MB in pieces of 512 KB"):
        await store.put("t", b"one more")
    await store.put("other", b"one more")
    # Another process counts what this one has stored.
    with pytest.raises(MediaFullError, match="--media-tenant-bytes"):
        await MediaStore(place.js, tenant_bytes=2 * PIECE_BYTES).put("t", b"one more")


async def test_full_store_refuses_and_keeps_what_it_has(place: Place) -> None:
    store = MediaStore(place.js)
    first = bytes(4 << 20)
    await store.put("t", first)
    with pytest.raises(MediaFullError, match="is full"):
        await store.put("other", bytes(5 << 20))
    assert await store.get("t", ref(first)) == first


async def test_store_that_does_not_answer_is_told_apart(place: Place) -> None:
    place.server.kill()
    with pytest.raises(MediaStoreError, match="does not answer"):
        await MediaStore(place.nats.jetstream(timeout=0.1)).put("t", b"image")
