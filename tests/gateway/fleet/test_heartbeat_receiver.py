"""Heartbeats count for whom their subject names, and no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from nats.aio.msg import Msg

from gateway.fleet import heartbeat_receiver
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import OwnRequests
from gateway.fleet.heartbeat_receiver import HeartbeatReceiver
from gateway.fleet.liveness import FleetLimits
from shared.messages import GatewayHeartbeat, Heartbeat, encode
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
            note_host_beat=lambda beat, now: self.log.append((beat, now)),
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
        (worker_subject("m", "w2"), encode(BEAT), f"it names {worker_subject('m', 'w1')}"),
        (worker_subject("n", "w1"), encode(BEAT), f"it names {worker_subject('m', 'w1')}"),
        (worker_subject("m", "w1"), b"\xc1", "is not a heartbeat"),
        (worker_subject("m", "w1"), encode(GATEWAY), "is not a heartbeat"),
        (worker_subject("m", "w1"), encode(msgspec.structs.replace(BEAT, worker="a\0")), "is not a heartbeat"),
        (gateway_subject("gw1"), encode(GATEWAY), "it names hr.gateway.gw2"),
        (gateway_subject("gw2"), encode(BEAT), "is not a heartbeat"),
        (gateway_subject("gw2"), encode(msgspec.structs.replace(GATEWAY, gateway="\0")), "is not a heartbeat"),
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
    assert heard.receiver._subjects == {("m", name): worker_subject("m", name) for name in ("w3", "w4")}
    assert len(heard.log) == 8


def _receive(receiver: HeartbeatReceiver, heartbeat: Heartbeat, model: str | None = None) -> None:
    nobody: Msg = Msg(None, worker_subject(model or heartbeat.model, heartbeat.worker), data=encode(heartbeat))  # type: ignore[arg-type]
    receiver._receive_worker(nobody)


async def test_name_of_a_live_worker_is_not_taken_by_one_of_another_model() -> None:
    fleet = Fleet("g", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
    receiver = HeartbeatReceiver(fleet, lambda model, worker: None)
    theirs = msgspec.structs.replace(BEAT, worker="w2", model="n")
    lie = msgspec.structs.replace(theirs, model="m", running=0, draining=True)
    _receive(receiver, theirs)
    _receive(receiver, lie)
    assert [(beat.model, beat.draining) for beat in fleet.workers()] == [("n", False)]
    # NATS lets a login for one model publish under this model alone; what a heartbeat says must be the same.
    _receive(receiver, msgspec.structs.replace(lie, model="n"), model="m")
    assert [(beat.model, beat.draining) for beat in fleet.workers()] == [("n", False)]
    # Once it is dead its name is free: a machine that is set up anew may serve something else.
    fleet.sweep(asyncio.get_running_loop().time() + 60)
    _receive(receiver, lie)
    assert [beat.model for beat in fleet.workers()] == ["m"]


@pytest.mark.parametrize("started", [BEAT.started, BEAT.started + 60])
@pytest.mark.parametrize("is_stalled", [False, True])
async def test_name_whose_heartbeats_have_stopped_is_free_although_its_probes_are_answered(
    started: float, is_stalled: bool
) -> None:
    deaths: list[str] = []
    own = OwnRequests(lambda model: (0, 0), dict)
    fleet = Fleet("g", FleetLimits(), own, lambda death: deaths.append(f"{death.model}: {death.why}"))
    receiver = HeartbeatReceiver(fleet, lambda model, worker: None)
    now = asyncio.get_running_loop().time()
    receiver._loop = cast("Any", SimpleNamespace(time=lambda: now))
    old = msgspec.structs.replace(BEAT, running=1 if is_stalled else 0)
    while is_stalled and not deaths:
        now += 0.2
        _receive(receiver, old)
        fleet.sweep(now)
    _receive(receiver, old)
    deaths.clear()
    new = msgspec.structs.replace(BEAT, model="n", started=started)
    heard_after_s: list[float] = []
    began = now
    while now < began + 2:
        now += 0.1
        for worker in fleet.liveness.take_probes(now):
            fleet.liveness.note_answer(worker, now)
        fleet.sweep(now)
        _receive(receiver, new)
        if [beat.model for beat in fleet.workers()] == ["n"]:
            heard_after_s.append(now - began)
    # A live worker keeps its name while its heartbeats are late.
    assert FleetLimits().silence_s < heard_after_s[0] < FleetLimits().silence_s + 0.25
    assert deaths == ["m: it was restarted"]
    # And from then on the new one holds it.
    _receive(receiver, old)
    assert [beat.model for beat in fleet.workers()] == ["n"]


async def test_name_is_not_free_because_this_gateway_could_not_hear() -> None:
    fleet = Fleet("g", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
    now = 100.0
    fleet.note_heartbeat(BEAT, now)
    fleet.sweep(now)
    # Paused for long: what came meanwhile is read before the sweep, in any order.
    now += 60
    assert fleet.serves_another(BEAT.worker, "n")
    fleet.discount_pause(60, now)
    fleet.sweep(now)
    assert fleet.serves_another(BEAT.worker, "n")
    fleet.liveness.nats_disconnected()
    now += 60
    fleet.sweep(now)
    fleet.liveness.nats_reconnected(now)
    fleet.sweep(now)
    assert fleet.serves_another(BEAT.worker, "n")
