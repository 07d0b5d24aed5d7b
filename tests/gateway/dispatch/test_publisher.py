"""Publications and their acknowledgements; NATS is in memory."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.dispatch import publisher as publisher_module
from gateway.dispatch.inflight import Flight
from gateway.dispatch.publisher import Publisher
from gateway.errors import ApiError
from shared.disaggregation import KvReady
from shared.messages import Request, decode_request
from shared.subjects import request_subject
from tests.gateway.dispatch_bench import ListSink


class Queue:
    """A publisher, what it sent, and what it was told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, str]] = []
        self.stored: list[tuple[Flight, int, int]] = []
        self.refused: list[tuple[Flight, int, ApiError]] = []
        self.without_stream: list[tuple[Flight, int]] = []
        self.subscribed: dict[str, Any] = {}
        self.taken = {"interactive", "resumed"}
        self.nats = SimpleNamespace(
            max_payload=10_000,
            is_connected=True,
            new_inbox=lambda: "_INBOX.g",
            send=lambda subject, payload, reply: self.sent.append((subject, payload, reply)),
            subscribe_direct=self._subscribe,
        )
        self.publisher = Publisher(
            cast("Any", self.nats),
            cast("Any", SimpleNamespace(takers_of_resumed=lambda model: (1, 1), takes=self._takes)),
            on_stored=lambda *told: self.stored.append(told),
            on_refused=lambda *told: self.refused.append(told),
            on_no_stream=lambda *told: self.without_stream.append(told),
        )
        self.publisher._loop = cast("Any", SimpleNamespace(time=lambda: 7.0))

    def _takes(self, model: str, queue: str) -> bool:
        return queue in self.taken

    async def _subscribe(self, subject: str, receive: object) -> None:
        self.subscribed[subject] = receive

    def acknowledge(self, reply: str, **fields: object) -> None:
        data = json.dumps(fields).encode() if fields else b""
        self.subscribed["_INBOX.g.*"](SimpleNamespace(subject=reply, data=data))


@pytest.fixture
async def queue() -> Queue:
    queue = Queue()
    await queue.publisher.start()
    return queue


def flight(name: str = "a", model: str = "m", **fields: Any) -> Flight:
    request = Request(id=name, model=model, text=fields.pop("text", "x"))
    return Flight(request, ListSink(), 1, 0.0, **fields)


async def test_acknowledgement_tells_where_the_attempt_is_stored(queue: Queue) -> None:
    first, second = flight("a", epoch=2), flight("b")
    first.log.published_at = 3.0  # of a pause before
    for each in (first, second):
        queue.publisher.publish(each)
    assert (first.published_at, first.log.published_at, first.ack) == (7.0, None, "_INBOX.g.0")
    subject, payload, reply = queue.sent[0]
    assert (subject, reply) == (request_subject("m", "interactive", "default"), "_INBOX.g.0")
    assert msgspec.msgpack.decode(payload, type=Request) == first.attempt()
    queue.acknowledge("_INBOX.g.1", stream="S", seq=41)
    # Meanwhile the flight has moved on: its number is told with the epoch that was published.
    first.epoch = 3
    queue.acknowledge("_INBOX.g.0", seq=42)
    assert queue.stored == [(second, 0, 41), (first, 2, 42)]
    assert first.ack is None
    for reply in ("_INBOX.g.0", "_INBOX.g.99"):
        queue.acknowledge(reply, seq=43)
    assert (len(queue.stored), queue.refused) == (2, [])


async def test_acknowledgement_of_an_earlier_attempt_leaves_the_later_one_waiting(queue: Queue) -> None:
    moved = flight()
    queue.publisher.publish(moved)
    moved.epoch = 1
    queue.publisher.publish(moved)
    queue.acknowledge("_INBOX.g.0", seq=1)
    assert moved.ack == "_INBOX.g.1"
    queue.acknowledge("_INBOX.g.1", seq=2)
    assert queue.stored == [(moved, 0, 1), (moved, 1, 2)]


async def test_acknowledgement_that_is_not_waited_for_is_left(queue: Queue) -> None:
    forgotten = flight()
    queue.publisher.forget(forgotten)
    queue.publisher.publish(forgotten)
    queue.publisher.forget(forgotten)
    assert forgotten.ack is None
    queue.acknowledge("_INBOX.g.0", seq=1)
    assert (queue.stored, queue.refused) == ([], [])


async def test_lost_acknowledgements_do_not_keep_requests_that_have_ended(queue: Queue) -> None:
    for name in ("a", "b"):
        queue.publisher.publish(flight(name))
    queue.publisher._loop = cast("Any", SimpleNamespace(time=lambda: 7.0 + publisher_module.ACK_MEMORY_S + 1.0))
    last = flight("c")
    queue.publisher.publish(last)
    assert [kept.id for kept, _, _ in queue.publisher._waiting.values()] == ["c"]
    for reply in ("_INBOX.g.0", "_INBOX.g.2"):
        queue.acknowledge(reply, seq=1)
    assert queue.stored == [(last, 0, 1)]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"error": {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}}, "queue_full"),
        ({"error": {"code": 503, "description": "insufficient resources"}}, "queue_unavailable"),
    ],
)
async def test_refusal_is_told_with_its_reason(queue: Queue, answer: dict[str, Any], code: str) -> None:
    refused = flight(epoch=4)
    queue.publisher.publish(refused)
    queue.acknowledge("_INBOX.g.0", **answer)
    ((told, epoch, error),) = queue.refused
    assert (told, epoch) == (refused, 4)
    assert (error.status, error.code, error.retry_after_s) == (503, code, 2.0)
    assert (queue.stored, queue.without_stream) == ([], [])


@pytest.mark.parametrize(
    "answer",
    [{}, {"error": {"code": 503, "err_code": 10008, "description": "JetStream is unavailable"}}],
)
async def test_queue_that_is_not_there_or_not_led_is_told_apart(queue: Queue, answer: dict[str, Any]) -> None:
    waiting = flight(epoch=4)
    queue.publisher.publish(waiting)
    queue.acknowledge("_INBOX.g.0", **answer)
    assert queue.without_stream == [(waiting, 4)]
    assert (queue.stored, queue.refused, waiting.ack) == ([], [], None)


async def test_request_larger_than_nats_takes_is_refused_at_once(queue: Queue) -> None:
    size = len(msgspec.msgpack.encode(flight().attempt()))
    queue.nats.max_payload = size
    queue.publisher.publish(flight())
    with pytest.raises(ApiError) as refused:
        queue.publisher.publish(flight(text="xx"))
    assert (refused.value.status, refused.value.param, refused.value.code) == (413, "prompt", "request_too_large")
    assert f"takes {size + 1} bytes on the wire; at most {size}" in refused.value.message
    assert len(queue.sent) == 1


async def test_connection_that_is_away_is_told_at_once(queue: Queue) -> None:
    queue.nats.is_connected = False
    with pytest.raises(ApiError) as refused:
        queue.publisher.publish(flight())
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "queue_unavailable", 2.0)

    def fail(*arguments: object) -> None:
        raise OSError

    queue.nats.is_connected, queue.nats.send = True, fail
    lost = flight()
    with pytest.raises(ApiError, match="cannot be reached"):
        queue.publisher.publish(lost)
    assert (lost.ack, queue.publisher._waiting) == (None, {})


async def test_what_had_its_turn_and_suspects_go_to_the_queue_that_is_pulled_first(queue: Queue) -> None:
    first = {"a": {"has_begun": True}, "b": {"num_unclaimed": 1}, "c": {"probation": 1}}
    flights = [flight("new", epoch=1), *(flight(name, **fields) for name, fields in first.items())]
    for each in flights:
        queue.publisher.publish(each)
    resumed = request_subject("m", "resumed", "default")
    subjects = [request_subject("m", "interactive", "default"), resumed, resumed, resumed]
    assert [subject for subject, _, _ in queue.sent] == subjects
    assert [each.queue for each in flights] == ["interactive", "resumed", "resumed", "resumed"]


@pytest.mark.parametrize(("taken", "expected"), [(True, "ready"), (False, "resumed")])
async def test_what_was_computed_elsewhere_goes_to_those_who_decode(queue: Queue, taken: bool, expected: str) -> None:
    if taken:
        queue.taken.add("ready")
    computed = flight("a", epoch=1, has_begun=True, ready=KvReady("a", 0, "w1", "0" * 32))
    queue.publisher.publish(computed)
    assert computed.queue == expected
    ((subject, payload, _),) = queue.sent
    assert subject == {"ready": "hr.req.m_ready.resumed", "resumed": "hr.req.m.resumed"}[expected]
    # The version before refuses the field in any other queue.
    assert decode_request(payload).ready == (computed.ready if taken else None)


async def test_subjects_that_are_remembered_are_bounded(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MAX_SUBJECTS", 2)
    for model in ("m1", "m2", "m1", "m3"):
        queue.publisher.publish(flight(model=model))
    assert [subject for subject, _, _ in queue.sent] == [
        request_subject(model, "interactive", "default") for model in ("m1", "m2", "m1", "m3")
    ]
    assert list(queue.publisher._subjects) == ["m3"]


@pytest.mark.parametrize("is_within_share", [True, False])
async def test_what_others_give_way_to_goes_first(queue: Queue, is_within_share: bool) -> None:
    queue.publisher._is_within_share = lambda flight: is_within_share
    new = flight()
    queue.publisher.publish(new)
    kind = "resumed" if is_within_share else "interactive"
    assert new.queue == kind
    assert [subject for subject, _, _ in queue.sent] == [request_subject("m", kind, "")]
