"""Which heartbeats count: those of whoever may speak for the model and the name, as far as a gateway can tell."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from nats.aio.msg import Msg

from gateway.fleet.claims import OwnRequests
from gateway.fleet.fleet import Fleet
from gateway.fleet.heartbeat_receiver import HeartbeatReceiver
from gateway.fleet.liveness import FleetLimits
from shared.messages import Heartbeat, encode
from shared.subjects import worker_subject
from tests.gateway.fleet.test_fleet import BEAT


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
