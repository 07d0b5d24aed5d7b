"""Heartbeats count for whom their subject names, and nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.fleet import heartbeat_receiver
from gateway.fleet.heartbeat_receiver import HeartbeatReceiver
from shared.messages import GatewayHeartbeat, encode
from shared.subjects import ALL_GATEWAYS, ALL_WORKERS, gateway_subject, worker_subject
from tests.gateway.fleet.test_fleet import BEAT

GATEWAY = GatewayHeartbeat(gateway="gw2", unclaimed=1, unclaimed_tokens=2)


class Heard:
    """A receiver, and what it passed on."""

    def __init__(self) -> None:
        self.rooms = True
        self.log: list[tuple[object, ...]] = []
        fleet = SimpleNamespace(
            has_room_for=lambda worker: self.rooms,
            serves_another=lambda worker, model: False,
            note_heartbeat=lambda beat, now: self.log.append((beat, now)),
            note_gateway_heartbeat=lambda beat, now: self.log.append((beat, now)),
        )
        self.receiver = HeartbeatReceiver(cast("Any", fleet), lambda model, name: self.log.append((model, name)))
        self.receiver._loop = cast("Any", SimpleNamespace(time=lambda: 7.0))

    async def hear(self, subject: str, data: bytes) -> None:
        """Let a message come by the subscription that matches it."""
        subscriptions: dict[str, Any] = {}

        async def subscribe(subject: str, receive: object) -> None:
            subscriptions[subject] = receive

        await self.receiver.start(cast("Any", SimpleNamespace(subscribe_direct=subscribe)))
        receive = subscriptions[ALL_WORKERS if subject.startswith("hr.worker.") else ALL_GATEWAYS]
        receive(SimpleNamespace(subject=subject, data=data))


@pytest.fixture
async def heard() -> Heard:
    return Heard()


async def test_worker_is_told_by_name_and_then_by_its_state(heard: Heard) -> None:
    for _ in range(2):
        await heard.hear(worker_subject("m", "w1"), encode(BEAT))
        assert heard.log == [("m", "w1"), (BEAT, 7.0)]
        heard.log.clear()


async def test_gateway_is_told_by_its_state(heard: Heard) -> None:
    await heard.hear(gateway_subject("gw2"), encode(GATEWAY))
    assert heard.log == [(GATEWAY, 7.0)]


@pytest.mark.parametrize(
    ("subject", "data", "reason"),
    [
        (worker_subject("m", "w2"), encode(BEAT), "it names worker 'w1' of model 'm'"),
        (worker_subject("n", "w1"), encode(BEAT), "it names worker 'w1' of model 'm'"),
        (worker_subject("m", "w1"), b"\xc1", "is no heartbeat"),
        (worker_subject("m", "w1"), encode(GATEWAY), "is no heartbeat"),
        (worker_subject("m", "w1"), encode(msgspec.structs.replace(BEAT, worker="a\0")), "is no heartbeat"),
        (gateway_subject("gw1"), encode(GATEWAY), "it names gateway 'gw2'"),
        (gateway_subject("gw2"), encode(BEAT), "is no heartbeat"),
        (gateway_subject("gw2"), encode(msgspec.structs.replace(GATEWAY, gateway="\0")), "is no heartbeat"),
    ],
)
async def test_what_is_no_heartbeat_of_its_subject_is_dropped_and_told(
    heard: Heard, subject: str, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    await heard.hear(subject, data)
    assert heard.log == []
    assert subject in caplog.text
    assert reason in caplog.text


async def test_name_that_was_heard_on_its_subject_may_not_change_there(heard: Heard) -> None:
    await heard.hear(worker_subject("m", "w1"), encode(BEAT))
    heard.log.clear()
    await heard.hear(worker_subject("m", "w1"), encode(msgspec.structs.replace(BEAT, worker="w2")))
    assert heard.log == []


@pytest.mark.parametrize("subject", [worker_subject("m", "doctor-1"), gateway_subject("doctor-1")])
async def test_empty_message_of_the_doctor_is_dropped_silently(
    heard: Heard, caplog: pytest.LogCaptureFixture, subject: str
) -> None:
    await heard.hear(subject, b"")
    assert (heard.log, caplog.records) == ([], [])


async def test_worker_that_is_one_too_many_is_dropped(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    heard.rooms = False
    await heard.hear(worker_subject("m", "w1"), encode(BEAT))
    assert heard.log == []
    assert "workers already" in caplog.text


async def test_names_that_are_remembered_are_bounded(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_receiver, "MAX_NAMES", 2)
    for name in ("w1", "w2", "w3", "w4"):
        await heard.hear(worker_subject("m", name), encode(msgspec.structs.replace(BEAT, worker=name)))
    assert heard.receiver._names == {worker_subject("m", name): ("m", name) for name in ("w3", "w4")}
    assert len(heard.log) == 8
