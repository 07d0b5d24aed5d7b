"""What one tenant's streams may keep, in bytes, whatever the size of their heads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from nats.js import JetStreamContext

from gateway.admission.stored_reads import ReadSize
from gateway.api.answer import AnswerStamp
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from gateway.resumable import log as stream_log
from gateway.resumable.fences import Fences
from gateway.resumable.log import StreamLog
from gateway.resumable.record import PIECE_BYTES, Entry, KeyRecord, StreamForm, StreamHead, digest_of
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.streams import STREAMS_STREAM, StreamLimits
from shared.subjects import journal_subject, stream_subject
from tests.servers import NatsServer

MAX_BYTES = 2 << 20


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[tuple[StreamLog, JetStreamContext]]:
    server = NatsServer(tmp_path)
    server.start()
    nats = await connect(server.url, role="gateway", name="log")
    log = StreamLog(nats, StreamLimits(streams_max_bytes=MAX_BYTES))
    await log.ensure()
    yield log, nats.jetstream()
    await log.close()
    await nats.close()
    server.kill()


def head_of(tenant: str, stream_id: str, num_bytes: int = 0) -> StreamHead:
    generation = Generation("completion", "m", (Prompt(1),), 1, Sampling(), deterministic=False)
    form = msgspec.structs.replace(
        StreamForm.of(generation, "completion"), chat_format=os.urandom(num_bytes // 2).hex()
    )
    return StreamHead(
        id=stream_id, tenant=tenant, key_id="k", model="m", form=form, stamp=AnswerStamp("a", 0), fingerprint=None,
        owner="w", num_request_pieces=0, created=0.0,
    )  # fmt: skip


async def test_large_head_is_read_as_written_and_lies_in_small_messages(
    opened: tuple[StreamLog, JetStreamContext],
) -> None:
    log, js = opened
    head = head_of("t", "s", 76_000)
    seq = await log.create(head, [b"request"])
    found = await log.find("t", "s")
    assert found is not None
    assert (found.head, found.seq) == (head, seq)
    state = (await js.stream_info(STREAMS_STREAM)).state
    numbers = range(state.first_seq, state.last_seq + 1)
    sizes = [len((await js.get_msg(STREAMS_STREAM, seq=number)).data or b"") for number in numbers]
    assert sum(sizes) > 76_000
    assert max(sizes) <= PIECE_BYTES
    assert await log.replace(msgspec.structs.replace(head, ended=1.0), seq) is not None
    found = await log.find("t", "s")
    assert found is not None
    assert found.head.ended == 1.0
    # The chunks before the change are the same messages.
    assert (await js.stream_info(STREAMS_STREAM)).state.messages <= state.messages + 3
    await log.delete(head)
    assert (await js.stream_info(STREAMS_STREAM)).state.messages == 0


async def test_list_reads_no_heads_of_ended_streams(
    opened: tuple[StreamLog, JetStreamContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = opened
    monkeypatch.setattr(stream_log, "MAX_LISTED", 2)
    for number in range(6):
        head = head_of("t", f"s{number}")
        seq = await log.create(head, [b"request"])
        if number not in (3, 5):
            await log.replace(msgspec.structs.replace(head, ended=1.0), seq)
    size = ReadSize()
    heads, has_more = await log.heads("t", size)
    assert ({head.id for head in heads}, has_more) == ({"s3", "s5"}, False)
    assert (size.num_records, size.num_names) == (2, 6 + 4)
    await log.delete(head_of("t", "s0"))
    await log.create(head_of("t", "s0"), [b"request"])
    heads, has_more = await log.heads("t", size)
    assert (len(heads), has_more) == (2, True)
    monkeypatch.setattr(stream_log, "MAX_LISTED", 9)
    heads, has_more = await log.heads("t", size)
    assert ({head.id for head in heads}, has_more) == ({"s0", "s3", "s5"}, False)


async def test_large_heads_of_a_tenant_push_out_its_own_streams(
    opened: tuple[StreamLog, JetStreamContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = opened
    monkeypatch.setattr(log._bound, "_keep", MAX_BYTES // 4 // PIECE_BYTES)
    monkeypatch.setattr(log._bound, "_every", 16)
    await log.create(head_of("victim", "v"), [b"request"])
    for number in range(64):
        await log.create(head_of("evil", f"s{number}", 76_000), [b"request"])
        await log.close()
    assert await log.find("victim", "v") is not None
    assert await log.find("evil", "s0") is None


async def test_stream_keeps_its_requests_when_another_is_to_have_its_id(
    opened: tuple[StreamLog, JetStreamContext],
) -> None:
    log, _ = opened
    head = msgspec.structs.replace(head_of("t", "s"), num_request_pieces=1)
    await log.create(head, [b"own"])
    with pytest.raises(ApiError, match="There is a resumable stream 's' already"):
        await log.create(msgspec.structs.replace(head, owner="other"), [b"of another key"])
    assert await log.requests(head) == [b"own"]


async def test_no_head_is_looked_for_by_an_id_that_nothing_can_have(
    opened: tuple[StreamLog, JetStreamContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = opened

    async def fail(subject: str) -> None:
        pytest.fail(f"{subject} is read")

    head = msgspec.structs.replace(head_of("t", "new"), num_request_pieces=1)
    with monkeypatch.context() as patched:
        patched.setattr(log, "_last", fail)
        await log.create(head, [b"own"], is_unused=True)
    assert await log.requests(head) == [b"own"]


async def test_stream_that_was_refused_is_forgotten_and_another_of_its_id_stays(
    opened: tuple[StreamLog, JetStreamContext],
) -> None:
    log, js = opened
    head = head_of("t", "s")
    assert not await log.withdraw(head)
    await log.create(head, [b"request"])
    assert await log.withdraw(msgspec.structs.replace(head, created=1.0))
    assert [each.id for each in (await log.heads("t", ReadSize()))[0]] == ["s"]
    assert await log.withdraw(head)
    assert await log.heads("t", ReadSize()) == ([], False)
    assert (await js.stream_info(STREAMS_STREAM)).state.messages == 0


async def test_stream_never_has_the_requests_of_another_that_began_at_once_by_its_id(
    opened: tuple[StreamLog, JetStreamContext],
) -> None:
    log, js = opened
    kept = {"one": [b"first of one", b"rest"], "two": [b"first of two", b"rest"]}
    heads = [
        msgspec.structs.replace(
            head_of("t", "s"), owner=owner, num_request_pieces=2, requests_digest=digest_of(kept[owner])
        )
        for owner in kept
    ]
    outcomes = await asyncio.gather(*(log.create(head, kept[head.owner]) for head in heads), return_exceptions=True)
    (error,) = [outcome for outcome in outcomes if not isinstance(outcome, int)]
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (409, "x-request-id")
    found = await log.find("t", "s")
    assert found is not None
    head = found.head
    own, other = kept[head.owner], kept["two" if head.owner == "one" else "one"]

    async def written_last(pieces: list[bytes]) -> list[bytes]:
        for number, piece in enumerate(pieces):
            await js.publish(stream_subject("t", "s", "req", number), piece)
        return await log.requests(head)

    assert await written_last(own) == own
    with pytest.raises(ApiError, match="has overwritten its own") as raised:
        await written_last(other)
    assert raised.value.status == 410


async def test_key_is_released_by_whoever_has_claimed_it_alone(opened: tuple[StreamLog, JetStreamContext]) -> None:
    log, _ = opened
    first = await log.claim_key("t", "digest", KeyRecord("s", "d", 0.0), 0)
    assert first is not None
    second = await log.claim_key("t", "digest", KeyRecord("s2", "d", 0.0), first)
    assert second is not None
    await log.release_key("t", "digest", first)
    await log.delete(msgspec.structs.replace(head_of("t", "s"), key_digest="digest", key_seq=first))
    assert await log.find_key("t", "digest") == (KeyRecord("s2", "d", 0.0), second)
    await log.release_key("t", "digest", second)
    assert await log.find_key("t", "digest") is None


async def test_first_stream_after_nats_has_lost_its_memory_is_stored(
    opened: tuple[StreamLog, JetStreamContext],
) -> None:
    log, js = opened
    await js.delete_stream(STREAMS_STREAM)
    await log.create(head_of("t", "s"), [b"request"])
    assert await log.find("t", "s") is not None
    await js.delete_stream(STREAMS_STREAM)
    assert await log.claim_key("t", "digest", KeyRecord("s", "d", 0.0), 0)


async def test_revoked_writer_writes_no_more_and_whoever_comes_later_reads_the_same_journal(
    opened: tuple[StreamLog, JetStreamContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.resumable.fences._JOURNAL_KEPT_S", 1.0)
    log, js = opened
    await log.start()
    log.fences.send_journal("w", 0, msgspec.msgpack.encode((0, [("t", "s", 0, [(0, None, None)])])))
    seq = await log.fences.write("w", 0, (0, 1))
    assert seq is not None
    # The second one asks for itself: what it knows of the first is its fence alone.
    for fences in (log.fences, Fences(log._store, js)):
        entries: list[Entry] = []
        (await fences.revoke("w")).extend(head_of("t", "s"), entries)
        assert entries == [(0, None, None)]
        found = await fences.find("w")
        assert found is not None
        assert (found.is_own, found.span) == (False, (0, 1))
    assert await log.fences.write("w", seq, (0, 1)) is None
    # The journal is dropped once no client can ask for it.
    async with asyncio.timeout(10):
        while await log._store.last(journal_subject("w", 0)) is not None:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
    # Answers that were waited for are not kept.
    assert not log._store._answers
