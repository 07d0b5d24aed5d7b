"""What the name of an adapter means, by the heartbeats of its model's workers."""

from __future__ import annotations

import msgspec
import pytest

from gateway.api.model_abilities import with_adapter
from gateway.api.sequences import wire_requests
from gateway.errors import ApiError
from gateway.fleet.fleet import FoundAdapter
from gateway.generation import Generation, Prompt
from shared.adapter_calls import AdapterBeat
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
    with pytest.raises(ApiError, match="they are being updated"):
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
