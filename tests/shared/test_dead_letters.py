from __future__ import annotations

import msgspec
import pytest
from nats.aio.client import Client

from shared.dead_letters import DeadAttempt, DeadLetter, fit_dead_letter, publish_dead_letter
from shared.errors import DependencyError
from shared.messages import Lane, Request
from shared.streams import DEAD_STREAM, StreamLimits, ensure_streams
from shared.subjects import dead_letter_filter, dead_letter_subject

decode = msgspec.msgpack.Decoder(DeadLetter).decode


def letter(request_id: str = "r", tenant: str = "t", lane: Lane = "interactive", epoch: int = 2) -> DeadLetter:
    request = Request(
        id=request_id, model="m.1", tenant=tenant, lane=lane, epoch=epoch, text="a prompt", emitted=(5, 6, 7)
    )
    attempts = (DeadAttempt("w1", 0, 10.0, "died"), DeadAttempt("w2", 1, 11.0, "died"))
    return DeadLetter(
        request=request,
        reason="worker_lost",
        error="two workers died with it",
        quarantined_by="g1",
        quarantined=12.0,
        attempts=attempts,
    )


async def test_letter_is_stored_whole_under_model_lane_and_tenant(nats: Client) -> None:
    await ensure_streams(nats.jetstream(), StreamLimits())
    seq = await publish_dead_letter(nats, letter(tenant="a b"))
    stored = await nats.jetstream().get_msg(DEAD_STREAM, seq)
    assert stored.subject == "hr.dead.m_2e1.interactive.a_20b"
    assert decode(stored.data or b"") == letter(tenant="a b")


async def test_same_attempt_told_by_gateway_and_worker_is_stored_once(nats: Client) -> None:
    await ensure_streams(nats.jetstream(), StreamLimits())
    sent = [letter(), msgspec.structs.replace(letter(), quarantined_by="w2"), letter(tenant="other"), letter(epoch=3)]
    numbers = [await publish_dead_letter(nats, each) for each in sent]
    assert numbers == [1, 1, 2, 3]


async def test_request_that_is_given_up_again_right_after_a_retry_has_a_letter_again(nats: Client) -> None:
    await ensure_streams(nats.jetstream(), StreamLimits())
    first = letter(lane="batch", epoch=0)
    retried = msgspec.structs.replace(first, request=msgspec.structs.replace(first.request, created=1_000.5))
    number = await publish_dead_letter(nats, first)
    await nats.jetstream().delete_msg(DEAD_STREAM, number)
    number = await publish_dead_letter(nats, retried)
    assert decode((await nats.jetstream().get_msg(DEAD_STREAM, number)).data or b"") == retried


async def test_many_letters_of_one_tenant_push_out_its_own_only(nats: Client) -> None:
    await ensure_streams(nats.jetstream(), StreamLimits(dead_max_msgs_per_subject=2))
    for request_id, tenant in (("x", "quiet"), ("a", "loud"), ("b", "loud"), ("c", "loud")):
        await publish_dead_letter(nats, letter(request_id, tenant))
    js = nats.jetstream()
    state = (await js.stream_info(DEAD_STREAM, subjects_filter=">")).state
    assert state.subjects == {
        dead_letter_subject("m.1", "interactive", "quiet"): 1,
        dead_letter_subject("m.1", "interactive", "loud"): 2,
    }
    oldest = await js.get_msg(DEAD_STREAM, seq=1, subject=dead_letter_filter(tenant="loud"), next=True)
    assert decode(oldest.data or b"").request.id == "b"


async def test_letters_of_one_tenant_take_an_eighth_of_the_stream_at_most(nats: Client) -> None:
    await ensure_streams(nats.jetstream(), StreamLimits())
    attempts = tuple(DeadAttempt("w", epoch, 0.0, "e" * 10_000) for epoch in range(64))
    huge = msgspec.structs.replace(letter(), attempts=attempts)
    for field in ({"text": "x" * 1_000_000}, {"emitted": (70000,) * 300_000}):
        await publish_dead_letter(
            nats, msgspec.structs.replace(huge, request=msgspec.structs.replace(huge.request, id=str(*field), **field))
        )
    state = (await nats.jetstream().stream_info(DEAD_STREAM)).state
    limits = StreamLimits()
    assert state.messages == 2
    assert state.bytes / 2 * limits.dead_max_msgs_per_subject <= limits.dead_max_bytes / 8


async def test_missing_stream_is_an_error_that_says_what_to_do(nats: Client) -> None:
    with pytest.raises(DependencyError, match="HR_DEAD does not exist; run `headrace setup`"):
        await publish_dead_letter(nats, letter())


def test_letter_too_large_loses_emitted_tokens_first_and_the_prompt_last() -> None:
    long = msgspec.structs.replace(letter(), request=msgspec.structs.replace(letter().request, text="x" * 5000))
    long = msgspec.structs.replace(long, request=msgspec.structs.replace(long.request, emitted=(70000,) * 1000))
    assert decode(fit_dead_letter(long, 20_000)) == long
    shorter = decode(fit_dead_letter(long, 6_000))
    assert (shorter.request.text, shorter.request.emitted, shorter.is_whole) == ("x" * 5000, (), True)
    bare = fit_dead_letter(long, 1_000)
    assert len(bare) <= 1_000
    assert (decode(bare).request.text, decode(bare).is_whole, decode(bare).error) == (None, False, long.error)


def test_endless_errors_and_attempts_are_shortened() -> None:
    attempts = tuple(DeadAttempt("w", epoch, 0.0, "e" * 10_000) for epoch in range(1000))
    found = decode(fit_dead_letter(msgspec.structs.replace(letter(), error="e" * 100_000, attempts=attempts), 1 << 20))
    assert len(found.error) == 2000
    assert [attempt.epoch for attempt in found.attempts] == list(range(936, 1000))


@pytest.mark.parametrize(
    ("selected", "subject"),
    [
        ({}, "hr.dead.*.*.*"),
        ({"model": "m.1"}, "hr.dead.m_2e1.*.*"),
        ({"lane": "batch", "tenant": "a b"}, "hr.dead.*.batch.a_20b"),
    ],
)
def test_filter_selects_by_model_lane_and_tenant(selected: dict[str, str], subject: str) -> None:
    assert dead_letter_filter(**selected) == subject  # type: ignore[arg-type]
