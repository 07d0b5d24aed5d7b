from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js.errors import APIError

from shared.batch_streams import batch_stream
from shared.consumers import ensure_consumer
from shared.errors import DependencyError
from shared.nats_connection import connect
from shared.streams import (
    BATCHES_STREAM,
    DEAD_STREAM,
    INTERACTIVE_STREAM,
    PROGRESS_STREAM,
    RESULTS_STREAM,
    StreamLimits,
    ensure_interactive_stream,
    ensure_streams,
    reshape_streams,
)
from shared.subjects import dead_letter_subject, request_subject, result_subject
from tests.servers import NatsServer, pull_subscription

LIMITS = StreamLimits(
    interactive_max_msgs=11,
    interactive_max_bytes=12_000,
    interactive_max_age_s=130.0,
    results_max_bytes=14_000,
    results_max_age_s=150.0,
    dead_max_bytes=16_000,
    dead_max_age_s=170.0,
    dead_max_msgs_per_subject=18,
    progress_max_bytes=19_000,
    progress_max_age_s=200.0,
    batches_max_bytes=20_500,
    batches_max_age_s=205.0,
    tenant_max_msgs=21,
    tenant_max_bytes=22_000,
    tenant_duplicate_window_s=23.0,
    ack_wait_s=24.0,
)


async def test_streams_are_made_once_and_left_as_they_are(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(interactive_max_msgs=7))
    await ensure_streams(js, StreamLimits(interactive_max_msgs=9))
    assert (await js.stream_info(INTERACTIVE_STREAM)).config.max_msgs == 7


async def test_streams_have_the_bounds_they_were_given(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, LIMITS, ["t"])
    queue = (await js.stream_info(INTERACTIVE_STREAM)).config
    assert (queue.max_msgs, queue.max_bytes, queue.max_age) == (11, 12_000, 130)
    batches = (await js.stream_info(BATCHES_STREAM)).config
    assert (batches.max_bytes, batches.max_age) == (20_500, 205)
    assert (queue.storage, queue.retention, queue.discard) == ("memory", "workqueue", "new")
    batch = (await js.stream_info(batch_stream("t"))).config
    results = (await js.stream_info(RESULTS_STREAM)).config
    assert (results.max_bytes, results.max_age, results.max_msgs_per_subject) == (14_000, 150, 1)
    assert results.allow_direct
    assert (queue.duplicate_window, batch.duplicate_window) == (10, 23)
    dead = (await js.stream_info(DEAD_STREAM)).config
    assert (dead.max_bytes, dead.max_age, dead.max_msgs_per_subject) == (16_000, 170, 18)
    assert dead.duplicate_window == 120
    progress = (await js.stream_info(PROGRESS_STREAM)).config
    assert (progress.max_bytes, progress.max_age, progress.max_msgs_per_subject) == (19_000, 200, 1)
    for config in (results, dead, progress):
        assert (config.storage, config.retention, config.discard) == ("file", "limits", "old")
    assert (batch.max_msgs, batch.max_bytes) == (21, 22_000)
    made = await ensure_consumer(js, "m", "interactive", LIMITS)
    consumer = (await js.consumer_info(INTERACTIVE_STREAM, made.name)).config
    assert (consumer.ack_policy, consumer.ack_wait, consumer.max_deliver) == ("explicit", 24, -1)
    assert consumer.max_ack_pending == 10_000


async def test_stored_result_is_told_to_its_tenant(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits())
    told = await nats.subscribe("hr.stored.t.a")
    await js.publish(result_subject("t", "a"), b"1")
    assert (await told.next_msg(timeout=5)).data == b"1"


async def test_dead_letter_sent_twice_under_one_id_is_kept_once(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits())
    for _ in range(2):
        await js.publish(dead_letter_subject("m", "batch", "t"), b"1", headers={"Nats-Msg-Id": "a"})
    assert (await js.stream_info(DEAD_STREAM)).state.messages == 1


async def test_reshaped_streams_get_new_features_and_keep_their_limits_and_messages(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, LIMITS)
    found = (await js.stream_info(RESULTS_STREAM)).config
    await js.delete_stream(RESULTS_STREAM)
    old = found.evolve(subjects=["hr.result.t.*"], allow_direct=False, republish=None, duplicate_window=1.0)
    old = old.evolve(allow_atomic=True)
    await js.add_stream(old)
    await js.publish(result_subject("t", "a"), b"1")
    await reshape_streams(js, StreamLimits())
    info = await js.stream_info(RESULTS_STREAM)
    assert (info.config.subjects, info.config.allow_direct, info.state.messages) == (["hr.result.*.*"], True, 1)
    assert info.config.republish is not None
    # An operator may have allowed more.
    assert info.config.allow_atomic
    assert (info.config.max_bytes, info.config.max_age) == (14_000, 150)
    await reshape_streams(js, StreamLimits())
    assert (await js.stream_info(RESULTS_STREAM)).config == info.config


async def test_queue_of_an_older_version_is_not_served_before_it_is_set_up(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_interactive_stream(js, LIMITS)
    found = (await js.stream_info(INTERACTIVE_STREAM)).config
    await js.update_stream(found.evolve(subjects=["hr.req.*.interactive"]))
    with pytest.raises(DependencyError, match=r"without hr\.req\.\*\.resumed: run `headrace setup`"):
        await ensure_interactive_stream(js, LIMITS)
    await ensure_streams(js, LIMITS)
    await reshape_streams(js, LIMITS)
    await ensure_interactive_stream(js, LIMITS)


async def test_streams_that_are_not_there_cannot_be_reshaped(nats: Client) -> None:
    with pytest.raises(DependencyError, match=INTERACTIVE_STREAM):
        await reshape_streams(nats.jetstream(), StreamLimits())


async def test_server_without_jetstream_is_named_as_the_reason(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    client = await connect(server.url, role="admin", name="test")
    js = client.jetstream(timeout=0.1)
    server.pause()
    with pytest.raises(DependencyError, match="JetStream"):
        await ensure_interactive_stream(js, StreamLimits())
    server.resume()
    await client.close()


async def test_consumer_of_a_queue_that_is_not_there_cannot_be_made(nats: Client) -> None:
    with pytest.raises(DependencyError, match="m-interactive"):
        await ensure_consumer(nats.jetstream(), "m", "interactive", StreamLimits())


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
    made = [await ensure_consumer(js, model, "batch", StreamLimits(), "t") for model in ("a.b", "a")]
    await js.publish(request_subject("a.b", "batch", "t"), b"1")
    pending = [(await js.consumer_info(batch_stream("t"), each.name)).num_pending for each in made]
    assert pending == [1, 0]
    assert await ensure_consumer(js, "a", "batch", StreamLimits(), "t") == made[1]


async def test_user_who_may_not_make_streams_is_told_what_to_do(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text('jetstream { max_file_store: 1KB }\nauthorization { users: [{ user: "u", password: "p" }] }\n')
    client = await connect(start_nats("-c", str(config)).url, role="worker", name="w", user="u", password="p")
    with pytest.raises(DependencyError, match=r"HR_.*could not be created"):
        await ensure_streams(client.jetstream(), StreamLimits())
    await client.close()


async def test_consumer_has_one_group_of_its_own_which_all_workers_learn(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits())
    first, again, other = [await ensure_consumer(js, model, "interactive", StreamLimits()) for model in ("m", "m", "n")]
    assert first == again
    assert len({first.group, other.group}) == 2
    # An earlier version's worker makes it without a group, and its pulls are answered until the next of this version.
    earlier = await pull_subscription(js, "m", "interactive")
    await js.publish(request_subject("m", "interactive", ""), b"1")
    assert [message.data for message in await earlier.fetch(1, timeout=5)] == [b"1"]
    renewed = await ensure_consumer(js, "m", "interactive", StreamLimits())
    assert renewed.group != first.group
