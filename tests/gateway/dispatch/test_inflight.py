"""The table of flights: what is counted where, and what the next attempt asks for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.dispatch.inflight import Flight, FlightTable
from gateway.fleet.fleet_load import FleetLoad
from shared.kv_budget import EvictedBlocks, KvBudget
from shared.messages import Delta, Request
from shared.sampling import Sampling
from tests.gateway.admission.test_forecast import load
from tests.gateway.dispatch_bench import ListSink


def flight(request_id: str, tokens: int = 10, model: str = "m", tenant: str = "") -> Flight:
    return Flight(Request(id=request_id, model=model, text="x", tenant=tenant), ListSink(), tokens, 0.0)


def fleet_load(**changes: Any) -> FleetLoad:
    return load(**{"running": 0, "free_slots": 8, **changes})


@pytest.mark.parametrize(("num_blocks", "is_kept"), [(800, True), (900, False)])
def test_evictions_are_kept_as_far_as_the_prompt_has_blocks(num_blocks: int, is_kept: bool) -> None:
    asked = Request(id="a", model="m", text="x", kv_budget=KvBudget(1024, "heavy_hitters"))
    evicting = Flight(asked, ListSink(), 10, 0.0, prompt_tokens=10_000)
    evicting.note_evicted(Delta("a", 0, 0, evicted=EvictedBlocks(16, (1,) * num_blocks)))
    assert (evicting.evicted is not None) is is_kept


def test_claimed_request_counts_until_its_workers_next_heartbeat() -> None:
    table = FlightTable()
    first, second = flight("a"), flight("b", 5)
    table.add(first)
    table.add(second)
    assert table.unshown("m") == table.unclaimed_of()["m"] == (2, 15)
    table.claim(first, "w")
    assert table.unclaimed_of() == {"m": (1, 5)}
    assert table.unshown("m") == (2, 15)
    table.note_heartbeat("m", "w")
    assert table.unshown("m") == (1, 5)
    table.remove(first)
    assert table.unshown("m") == (1, 5)


def test_request_that_ends_before_the_heartbeat_counts_no_more() -> None:
    table = FlightTable()
    one = flight("a")
    table.add(one)
    table.claim(one, "w")
    assert table.remove(one)
    assert not table.remove(one)
    assert table.unshown("m") == (0, 0)


def test_released_request_waits_again_once() -> None:
    table = FlightTable()
    one = flight("a")
    table.add(one)
    table.claim(one, "w")
    table.release(one)
    table.release(one)
    table.forget_worker("w")
    assert table.unclaimed_of()["m"] == table.unshown("m") == (1, 10)


def test_models_are_counted_apart() -> None:
    table = FlightTable()
    table.add(flight("a"))
    table.add(flight("b", 3, "other"))
    assert table.unshown("other") == (1, 3)
    assert table.unclaimed_of() == {"m": (1, 10), "other": (1, 3)}


@pytest.mark.parametrize(("emitted", "has_prompt_output"), [([7, 8], False), ([], True)])
def test_next_attempt_continues_after_what_was_emitted(emitted: list[int], has_prompt_output: bool) -> None:
    one = flight("a")
    sampling = Sampling(prompt_logprobs=2)
    one.request = Request(id="a", model="m", text="x", echo=True, sampling=sampling, return_prompt_token_ids=True)
    assert one.attempt() == one.request
    one.probation = 5
    assert one.attempt() == msgspec.structs.replace(one.request, probation=5)
    one.probation, one.emitted = 0, [7]
    assert one.attempt().emitted == (7,)
    one.epoch, one.emitted, one.has_prompt_output = 2, emitted, has_prompt_output
    attempt = one.attempt()
    assert (attempt.epoch, attempt.emitted, attempt.echo) == (2, tuple(emitted), False)
    assert attempt.sampling.prompt_logprobs is None
    assert not attempt.return_prompt_token_ids


def test_claimed_request_is_awaited_until_its_attempt_produces_something() -> None:
    table = FlightTable()
    one, other = flight("a"), flight("b", 5)
    for each in (one, other):
        table.add(each)
    assert table.awaited() == {}
    table.claim(one, "w")
    table.claim(other, "w")
    assert table.awaited() == {"m": (2, 15)}
    table.note_output(one)
    table.note_output(one)
    assert table.awaited() == {"m": (1, 5)}
    # Its worker dies, and the next one has to begin anew.
    table.release(one)
    assert table.awaited() == {"m": (1, 5)}
    table.claim(one, "w2")
    assert table.awaited() == {"m": (2, 15)}
    table.remove(one)
    table.remove(other)
    assert table.awaited() == {}


def test_tenant_meets_its_share_of_a_busy_fleet_and_not_what_others_let_wait() -> None:
    table, load = FlightTable(), fleet_load(running=6, free_slots=2, total_blocks=100, free_blocks=3, block_size=4)
    for number in range(20):
        table.add(flight(f"greedy {number}", 8, tenant="greedy"))
    assert table.share(load, "greedy") is None
    share = table.share(load, "polite")
    assert share is not None
    assert (share.running, share.free_slots, share.free_blocks, share.total_blocks) == (0, 4, 50, 50)
    assert (share.queued_requests, share.queued_tokens) == (0, 0)
    own = flight("polite", 8, tenant="polite")
    table.add(own)
    share = table.share(load, "polite")
    assert share is not None
    assert (share.running, share.free_slots, share.free_blocks) == (1, 3, 48)
    greedy = table.share(load, "greedy")
    assert greedy is not None
    assert greedy.free_slots == -16
    third = table.share(load, "third")
    assert third is not None
    assert third.free_slots == 2
    table.remove(own)
    assert table.share(load, "greedy") is table.share(fleet_load(model="other", running=8), "polite") is None


def test_tenant_alone_at_its_gateway_has_a_share_beside_what_other_gateways_let_wait() -> None:
    table, load = FlightTable(), fleet_load(running=8, free_slots=0, total_blocks=100, queued_requests=3)
    for number in range(3):
        table.add(flight(str(number), tenant="greedy"))
    # All that waits is its own.
    assert table.share(load, "greedy") is None
    share = FlightTable().share(load, "polite")
    assert share is not None
    assert (share.running, share.free_slots, share.total_blocks) == (0, 4, 50)


def test_there_is_nothing_to_share_while_nothing_waits() -> None:
    table = FlightTable()
    for number in range(4):
        table.add(flight(str(number), tenant="greedy"))
    assert table.share(fleet_load(running=4, free_slots=4), "polite") is None
    # Blocks are short.
    assert table.share(fleet_load(running=4, free_slots=4, queued_requests=1), "polite") is not None
