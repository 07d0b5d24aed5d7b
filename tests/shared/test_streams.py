from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js.errors import APIError

from shared.batch_streams import batch_stream
from shared.errors import DependencyError
from shared.nats_connection import connect
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_consumer, ensure_streams
from shared.subjects import request_subject, result_subject
from tests.servers import NatsServer


@pytest.fixture
async def nats(start_nats: Callable[..., NatsServer]) -> AsyncIterator[Client]:
    client = await connect(start_nats().url, role="admin", name="test")
    yield client
    await client.close()


async def test_streams_are_made_once_and_left_as_they_are(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(interactive_max_msgs=7))
    await ensure_streams(js, StreamLimits(interactive_max_msgs=9))
    assert (await js.stream_info(INTERACTIVE_STREAM)).config.max_msgs == 7


async def test_streams_made_by_many_at_once_are_made_once(nats: Client) -> None:
    js = nats.jetstream()
    await asyncio.gather(*(ensure_streams(js, StreamLimits()) for _ in range(8)))
    assert (await js.stream_info(INTERACTIVE_STREAM)).state.messages == 0


async def test_number_of_a_lost_stream_names_nothing_in_the_one_that_replaces_it(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits())
    old = await js.publish(request_subject("m", "interactive", "t"), b"1")
    await js.delete_stream(INTERACTIVE_STREAM)
    await ensure_streams(js, StreamLimits())
    new = await js.publish(request_subject("m", "interactive", "t"), b"2")
    assert new.seq > old.seq
    with pytest.raises(APIError):
        await js.delete_msg(INTERACTIVE_STREAM, old.seq)
    assert (await js.stream_info(INTERACTIVE_STREAM)).state.messages == 1


async def test_full_queues_refuse_new_requests(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(interactive_max_msgs=1, tenant_max_msgs=1), ["t", "other"])
    await js.publish(request_subject("m", "interactive", "t"), b"1")
    with pytest.raises(APIError, match="maximum messages exceeded"):
        await js.publish(request_subject("m", "interactive", "t"), b"2")
    await js.publish(request_subject("m", "batch", "t"), b"1")
    with pytest.raises(APIError):
        await js.publish(request_subject("m", "batch", "t"), b"2")
    await js.publish(request_subject("m", "batch", "other"), b"1")


async def test_only_the_first_result_of_a_request_is_stored(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits())
    first_only = {"Nats-Expected-Last-Subject-Sequence": "0"}
    await js.publish(result_subject("t", "a"), b"1", headers=first_only)
    await js.publish(result_subject("t", "b"), b"1", headers=first_only)
    with pytest.raises(APIError) as raised:
        await js.publish(result_subject("t", "a"), b"2", headers=first_only)
    assert raised.value.err_code == 10071


async def test_consumers_of_two_models_share_a_stream_but_no_message(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(), ["t"])
    names = [await ensure_consumer(js, model, "batch", StreamLimits(), "t") for model in ("a.b", "a")]
    await js.publish(request_subject("a.b", "batch", "t"), b"1")
    pending = [(await js.consumer_info(batch_stream("t"), name)).num_pending for name in names]
    assert pending == [1, 0]
    assert await ensure_consumer(js, "a", "batch", StreamLimits(), "t") == names[1]


async def test_user_who_may_not_make_streams_is_told_what_to_do(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text('jetstream { max_file_store: 1KB }\nauthorization { users: [{ user: "u", password: "p" }] }\n')
    client = await connect(start_nats("-c", str(config)).url, role="worker", name="w", user="u", password="p")
    with pytest.raises(DependencyError, match=r"HR_.*could not be created"):
        await ensure_streams(client.jetstream(), StreamLimits())
    await client.close()
