"""Which heartbeats count: those of whoever may speak for the model and the name, as far as a gateway can tell."""

from __future__ import annotations

import asyncio

import msgspec
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
