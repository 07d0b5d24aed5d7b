"""What the name of an adapter means, by what operators say and by the heartbeats of its model's workers."""

from __future__ import annotations

import msgspec
import pytest

from gateway.api.model_abilities import with_adapter
from gateway.api.sequences import wire_requests
from gateway.errors import ApiError
from gateway.fleet.adapter_names import FoundAdapter
from gateway.generation import Generation, Prompt
from shared.adapter_calls import AdapterBeat
from shared.adapter_names import NamedAdapter
from shared.adapter_store import AdapterContent
from shared.features import ADAPTER_STORE, FEATURES
from shared.hosted_models import HostBeat, HostedModel
from shared.messages import Heartbeat, decode_request, encode
from shared.sampling import Sampling
from tests.gateway.fleet.test_fleet import BEAT, Watched

ONE, OTHER = "1" * 64, "2" * 64


def _watched(*workers: tuple[AdapterBeat, ...]) -> Watched:
    watched = Watched()
    watched.fleet.sweep(watched.now)
    for number, adapters in enumerate(workers):
        watched.hear(worker=f"w{number}", adapters=adapters)
    return watched


def _asked(model: str) -> Generation:
    return Generation("completion", model, (Prompt(1, text="a"),), 1, Sampling(), deterministic=True)


def test_name_means_what_all_workers_have() -> None:
    fleet = _watched((AdapterBeat("a", ONE), AdapterBeat("b", OTHER)), (AdapterBeat("a", ONE),)).fleet
    assert fleet.adapters() == {"a": "m"}
    assert fleet.find_adapter("a") == FoundAdapter("m", ONE)
    assert fleet.find_adapter("c") is None
    # The rollout of `b` is not done.
    assert fleet.find_adapter("b") == FoundAdapter("m", None)


def test_name_means_nothing_while_workers_differ() -> None:
    watched = _watched((AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),))
    assert watched.fleet.adapters() == {}
    with pytest.raises(ApiError) as refused:
        with_adapter(_asked("a"), watched.fleet)
    assert (refused.value.status, refused.value.code) == (503, "no_worker")
    watched.hear(worker="w0", adapters=(AdapterBeat("a", OTHER),))
    assert with_adapter(_asked("a"), watched.fleet).adapter == OTHER


def test_worker_of_the_version_before_gets_no_request_with_an_adapter() -> None:
    watched = _watched((AdapterBeat("a", ONE),))
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)
    watched.hear(worker="old", features=("resumed",))
    with pytest.raises(ApiError, match="can serve the adapter `a` at the moment"):
        with_adapter(_asked("a"), watched.fleet)


def test_newest_meaning_that_all_workers_have_counts() -> None:
    both, before = (AdapterBeat("a", ONE), AdapterBeat("a", OTHER)), (AdapterBeat("a", ONE),)
    watched = _watched(both, before)
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)
    watched.hear(worker="w1", adapters=both)
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", OTHER)
    watched.hear(worker="w0", adapters=both[1:])
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", OTHER)


def test_draining_workers_do_not_count() -> None:
    watched = _watched((AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),))
    watched.hear(worker="w0", draining=True, adapters=(AdapterBeat("a", ONE),))
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", OTHER)


def test_name_of_a_model_is_the_model() -> None:
    watched = _watched((AdapterBeat("m", ONE), AdapterBeat("other", ONE)))
    watched.hear(worker="w9", model="other")
    assert watched.fleet.adapters() == {}
    assert with_adapter(_asked("other"), watched.fleet).served_model == "other"


def test_name_stays_with_the_model_that_had_it_first() -> None:
    one, other = (AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),)
    watched = _watched(one)
    for model in ("blue", "z"):
        watched.hear(worker=f"liar-{model}", model=model, adapters=other)
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)
    assert watched.fleet.adapters() == {"a": "m"}

    # Its only worker is away for a while: nobody else gets the name.
    watched.run(30, worker="liar-blue", model="blue", running=0, adapters=other)
    assert watched.fleet.models() == ["blue"]
    assert watched.fleet.find_adapter("a") is None
    watched.hear(worker="w0", adapters=one)
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)


def test_name_that_its_model_gives_up_is_another_models() -> None:
    one, other = (AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),)
    watched = _watched(one)
    for _ in range(20):
        watched.hear(worker="next", model="blue", adapters=other)
        watched.run(0.1, worker="w0")
    assert watched.fleet.find_adapter("a") == FoundAdapter("blue", OTHER)


def test_second_process_of_a_workers_name_claims_no_name() -> None:
    watched = _watched(())
    watched.hear(worker="w0", model="blue", started=9.0, adapters=(AdapterBeat("a", OTHER),))
    watched.hear(worker="w1", adapters=(AdapterBeat("a", ONE),))
    watched.hear(worker="w0", adapters=(AdapterBeat("a", ONE),))
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)


def test_generation_is_answered_by_its_model_with_the_content_of_this_moment() -> None:
    watched = _watched((AdapterBeat("a", ONE),))
    generation = with_adapter(_asked("a"), watched.fleet)
    watched.hear(worker="w0", adapters=(AdapterBeat("a", OTHER),))
    assert (generation.model, generation.served_model, generation.adapter) == ("a", "m", ONE)


def test_heartbeats_of_the_version_before_have_none() -> None:
    fields = msgspec.to_builtins(BEAT)
    fields.pop("adapters", None)
    assert msgspec.convert(fields, Heartbeat).adapters == ()


def test_request_without_an_adapter_has_no_such_field() -> None:
    (plain,) = wire_requests(_asked("m"), "t", "hr.tok.g", 30.0, "req_1")
    assert b"adapter" not in encode(plain)
    adapted = msgspec.structs.replace(_asked("a"), base="m", adapter=ONE)
    (request,) = wire_requests(adapted, "t", "hr.tok.g", 30.0, "req_1")
    assert decode_request(encode(request)).adapter == ONE
    assert request.model == "m"


def _named(tenant: str | None, digest: str | None) -> NamedAdapter:
    return NamedAdapter("a", tenant, "m", None if digest is None else AdapterContent(digest, 8))


def test_tenants_name_goes_before_a_shared_one_and_nobody_else_has_it() -> None:
    watched = _watched(())
    watched.hear(worker="w0", features=(*FEATURES, ADAPTER_STORE))
    fleet = watched.fleet
    fleet.named_adapters.note(_named("acme", ONE))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", ONE)
    assert (fleet.find_adapter("a", "other"), fleet.find_adapter("a"), fleet.adapters("other")) == (None, None, {})
    fleet.named_adapters.note(_named(None, OTHER))
    found = [fleet.find_adapter("a", tenant) for tenant in ("acme", "other")]
    assert found == [FoundAdapter("m", ONE), FoundAdapter("m", OTHER)]
    fleet.named_adapters.note(_named("acme", None))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", OTHER)
    assert not fleet.named_adapters.was_removed("a", "acme")
    fleet.named_adapters.note(_named(None, None))
    assert (fleet.adapters("acme"), fleet.named_adapters.was_removed("a", "acme")) == ({}, True)


def test_what_an_operator_says_goes_before_what_workers_call_their_own() -> None:
    watched, features = _watched(()), (*FEATURES, ADAPTER_STORE)
    fleet = watched.fleet
    watched.hear(worker="w0", features=features, adapters=(AdapterBeat("a", ONE),))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", ONE)
    fleet.named_adapters.note(_named(None, OTHER))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", OTHER)
    fleet.named_adapters.note(_named("acme", ONE))
    assert [fleet.find_adapter("a", tenant) for tenant in ("acme", None)] == [
        FoundAdapter("m", ONE),
        FoundAdapter("m", OTHER),
    ]
    # A worker that starts again does not bring back what was removed.
    fleet.named_adapters.note(_named("acme", None))
    fleet.named_adapters.note(_named(None, None))
    assert (fleet.find_adapter("a", "acme"), fleet.adapters("acme")) == (None, {})


def test_adapter_of_a_model_that_sleeps_waits_for_it() -> None:
    watched = Watched()
    fleet, last = watched.fleet, msgspec.structs.replace(BEAT, features=(*FEATURES, ADAPTER_STORE))
    asleep = HostedModel(name="m", path="/m", state="asleep", on_demand=True, last=last)
    fleet.note_host_beat(HostBeat(host="h", models=(asleep,)), watched.now)
    fleet.named_adapters.note(_named(None, ONE))
    assert fleet.find_adapter("a") == FoundAdapter("m", ONE)
    assert with_adapter(_asked("a"), fleet).served_model == "m"
    # Its workers have no places.
    plain = msgspec.structs.replace(asleep, last=BEAT)
    fleet.note_host_beat(HostBeat(host="h", models=(plain,)), watched.now)
    assert fleet.find_adapter("a") == FoundAdapter("m", None)
