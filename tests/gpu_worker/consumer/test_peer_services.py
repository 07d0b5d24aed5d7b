"""What workers hear of the service that tenants have had elsewhere."""

from __future__ import annotations

from gpu_worker.consumer.peer_services import ADOPT_S, GatewayServiceBeat, PeerServices
from gpu_worker.consumer.prefixes.peers import PeerBeat
from gpu_worker.core.fleet_service import HeardServices
from shared.messages import GatewayHeartbeat, Heartbeat, encode
from shared.sampling import Sampling
from shared.services import TenantService
from shared.subjects import gateway_subject
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway


class Listener:
    def __init__(self) -> None:
        self.services, self.now = PeerServices("m", 0.0), ADOPT_S

    def hear(self, worker: str = "w", started: float = 1.0, ahead: float = 0.0, **served: float) -> None:
        told = tuple(TenantService(tenant, tokens, ahead) for tenant, tokens in served.items())
        self.services.note(PeerBeat(worker=worker, started=started, services={"interactive": told}), self.now)

    def hear_gateway(self, gateway: str, model: str, **ahead: float) -> None:
        told = tuple(TenantService(tenant, 0.0, tokens) for tenant, tokens in ahead.items())
        self.services.note_gateway(GatewayServiceBeat(gateway=gateway, services={model: {"batch": told}}), self.now)

    def taken(self) -> HeardServices:
        return self.services.take().get("interactive", HeardServices())


def test_sums_tell_what_was_served_meanwhile_although_heartbeats_are_lost() -> None:
    listener = Listener()
    listener.hear(a=1000.0)
    assert listener.taken().served == {}
    listener.hear(a=1010.0, b=5.0)
    listener.hear("other", a=70.0)
    # Two of its heartbeats are lost.
    listener.hear(a=1040.0)
    listener.hear("other", a=71.0)
    assert listener.taken().served == {"a": 41.0, "b": 5.0}
    assert listener.taken().served == {}
    # A tenant that was among too many to be told of.
    listener.hear(b=8.0)
    assert listener.taken().served == {"b": 3.0}


def test_worker_that_was_restarted_counts_from_nothing() -> None:
    listener = Listener()
    listener.hear(a=1000.0)
    listener.hear(started=2.0, a=5000.0)
    listener.hear(started=2.0, a=5001.0)
    assert listener.taken().served == {"a": 1.0}


def test_how_far_tenants_are_ahead_is_taken_over_once_of_each_teller_after_the_start() -> None:
    listener = Listener()
    listener.now = 1.0
    listener.hear("one", ahead=10.0, a=1.0)
    listener.hear("two", ahead=30.0, a=1.0)
    listener.hear("two", ahead=50.0, a=1.0)
    listener.hear_gateway("g", "m", a=7.0)
    listener.hear_gateway("h", "another", a=9.0)
    taken = listener.services.take()
    assert taken["interactive"].ahead == {"a": 30.0}
    assert taken["batch"].ahead == {"a": 7.0}
    listener.now = ADOPT_S
    listener.hear("three", ahead=90.0, a=1.0)
    listener.hear_gateway("i", "m", a=9.0)
    assert listener.services.take() == {}


async def test_worker_that_starts_takes_over_what_a_gateway_tells_and_tells_what_it_serves(
    worker: RunningWorker, make_worker: MakeWorker, gateway: TestGateway, model: str
) -> None:
    def ahead_of(beat: Heartbeat) -> dict[str, float]:
        return {service.tenant: service.ahead for service in beat.services.get("interactive", ())}

    told = GatewayHeartbeat(
        gateway="teller",
        unclaimed=0,
        unclaimed_tokens=0,
        services={model: {"interactive": (TenantService("heavy", 0.0, 5000.0),)}},
    )
    second = await make_worker()
    await gateway.nats.publish(gateway_subject("teller"), encode(told))
    await second.wait_for_heartbeat(lambda beat: ahead_of(beat).get("heavy") == 5000.0)
    await gateway.ask("x = 1", tenant="light", sampling=Sampling(max_tokens=7, ignore_eos=True))

    def has_served(beat: Heartbeat) -> bool:
        return any(each.tenant == "light" and each.served >= 12.0 for each in beat.services.get("interactive", ()))

    for each in (worker, second):
        if each.worker._engine.stats.step:
            await each.wait_for_heartbeat(has_served)
