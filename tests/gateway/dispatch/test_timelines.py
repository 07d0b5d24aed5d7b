"""What is kept of requests: each attempt once, within bounds, whichever end is heard of first."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from gateway.dispatch.inflight import Flight, key_of, new_key
from gateway.dispatch.timelines import (
    KEPT_S,
    LATE_S,
    MAX_DEVICE_WATTS,
    MAX_TIMELINE_BYTES,
    MAX_WITHOUT_TENANT,
    TimelineKeeper,
)
from shared.messages import Delta, Finish, Request
from shared.receipt import PrefillPart, Receipt
from shared.timeline import MAX_SEQUENCES, SequenceLife, Timeline
from shared.usage_ledger import UsageLedger
from tests.gateway.dispatch_bench import ListSink


class Counted(UsageLedger):
    def __init__(self) -> None:
        self.device_s = 0.0
        self.tenants: list[str] = []

    def add_time(self, tenant: str, model: str, receipt: Receipt) -> None:
        self.device_s += receipt.device_s
        self.tenants.append(tenant)


@dataclass
class Seen:
    """A request as an observer tells of it."""

    told: Timeline
    began_at: float
    ended_at: float | None = None
    sequences: list[SequenceLife] = field(default_factory=list)
    left_out: int = 0

    @property
    def request_id(self) -> str:
        return self.told.id

    @property
    def tenant(self) -> str | None:
        return self.told.tenant

    def timeline(self, gateway: str) -> Timeline:
        return self.told


class Bench:
    def __init__(self, max_kept: int = 100) -> None:
        self.now = time.monotonic()
        self.usage = Counted()
        self.keeper = TimelineKeeper("gw-1", max_kept, self.usage, clock=lambda: self.now)
        self.flights: list[Flight] = []
        self.devices: dict[str, int] = {}
        self.running: dict[str, Seen] = {}
        self.keeper.watch(lambda: self.flights, lambda worker: self.devices.get(worker, 1))

    def begin(self, request_id: str = "r", tenant: str = "t", worker: str | None = "w", key_id: str = "k") -> Flight:
        key, seen = new_key(), Seen(self.timeline(request_id, tenant, 0), self.now)
        self.running[key] = seen
        self.keeper.request_began(key, seen)
        request = Request(id=f"{key}-0", model="m", text="x", tenant=tenant, trace=request_id, key=key_id)
        flight = Flight(request, ListSink(), 1, self.now, worker=worker)
        flight.log.claimed_at = None if worker is None else self.now
        return flight

    def timeline(self, request_id: str = "r", tenant: str = "t", status: int = 200, **fields: Any) -> Timeline:
        outcome = "completed" if status == 200 else "running"
        told = {"outcome": outcome, "status": status, "began": time.time(), "ended_s": 1.0} | fields
        return Timeline(id=request_id, tenant=tenant, gateway="gw-1", model="m", **told)

    def end(self, flight: Flight | None, timeline: Timeline) -> None:
        """End a request; None for one that had no sequence."""
        key = new_key() if flight is None else key_of(flight.id)
        seen = self.running.pop(key, None) or Seen(timeline, self.now)
        seen.told, seen.ended_at = timeline, self.now
        self.keeper.request_ended(key, seen)

    def tell(self, flight: Flight, finish: Finish, worker: str = "w", *, has_ended: bool = False) -> None:
        delta = Delta(flight.id, flight.epoch, 0, finish=finish)
        self.keeper.receipt_came(worker, delta, None if has_ended else flight)

    def only(self, request_id: str = "r") -> Timeline:
        (found,) = self.keeper.find(request_id)
        return found


def finish(reason: Any = "stop", device_s: float = 0.5, **fields: Any) -> Finish:
    return Finish(reason, receipt=Receipt(taken=0.0, device_s=device_s, ended_s=1.0, **fields))


def test_every_attempt_is_told_with_its_own_receipt() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.now += 1
    bench.tell(flight, finish("handoff", 0.25))
    flight.log.end(flight.attempt_ended("handoff", bench.now))
    flight.epoch, flight.worker, flight.log.claimed_at = 1, "other", bench.now
    bench.now += 2
    end = finish("length", 0.75)
    bench.tell(flight, end, "other")
    assert [life.attempts[-1].worker for life in bench.only().sequences] == []
    bench.keeper.sequence_ended(flight, "completed", end)
    bench.end(flight, bench.timeline())
    (life,) = bench.only().sequences
    told = [(each.epoch, each.why, each.end, each.worker) for each in life.attempts]
    assert told == [(0, "first", "handoff", "w"), (1, "handoff", "length", "other")]
    assert [each.receipt and each.receipt.device_s for each in life.attempts] == [0.25, 0.75]
    assert [(each.claimed_s, each.ended_s) for each in life.attempts] == [
        (pytest.approx(0), pytest.approx(1)),
        (pytest.approx(1), pytest.approx(3)),
    ]
    assert bench.usage.device_s == pytest.approx(1.0)


def test_receipt_counts_once_and_only_from_the_worker_that_had_the_attempt() -> None:
    bench = Bench()
    flight = bench.begin()
    for worker in ("stranger", "w", "w"):
        bench.tell(flight, finish(), worker)
    assert bench.usage.tenants == ["t"]


def test_time_of_a_start_s_own_request_is_charged_to_no_tenant() -> None:
    bench = Bench()
    bench.tell(bench.begin(tenant="default", key_id="probe"), finish())
    assert bench.usage.tenants == []


def test_receipt_of_a_cancelled_request_counts_when_it_comes_late() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.now += 1
    bench.keeper.sequence_ended(flight, "cancelled", None)
    bench.end(flight, bench.timeline(status=499, outcome="disconnected"))
    assert bench.only().sequences[0].attempts[0].receipt is None
    bench.tell(flight, finish("cancelled"), "stranger", has_ended=True)
    for _ in range(2):
        bench.tell(flight, finish("cancelled"), has_ended=True)
    receipt = bench.only().sequences[0].attempts[0].receipt
    assert receipt is not None
    assert receipt.device_s == bench.usage.device_s == 0.5


def test_late_receipt_of_a_sequence_that_ended_before_its_request_was_known_is_counted() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.running.clear()
    bench.keeper._running.clear()
    bench.keeper.sequence_ended(flight, "cancelled", None)
    bench.end(flight, bench.timeline())
    bench.tell(flight, finish(), has_ended=True)
    assert bench.usage.device_s == 0.5
    assert bench.only().sequences == []


def test_receipt_that_comes_much_too_late_counts_no_more() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.keeper.sequence_ended(flight, "cancelled", None)
    bench.now += LATE_S + 1
    bench.tell(flight, finish("cancelled"), has_ended=True)
    assert bench.usage.tenants == []


def test_worker_cannot_charge_more_than_the_time_that_passed() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.now += 3
    bench.devices["w"] = 2
    bench.tell(flight, finish("stop", 1e9, prefill_s=5e8, energy_j=1e9, num_devices=1024))
    assert bench.usage.device_s == pytest.approx((3 + 1) * 2)
    receipt = flight.log.receipts[0]
    assert receipt.prefill_s == pytest.approx(receipt.device_s / 2)
    assert receipt.energy_j == pytest.approx(receipt.device_s)
    assert receipt.num_devices == 2


def test_parts_of_a_receipt_are_no_more_than_the_whole_and_energy_no_more_than_devices_draw() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.now += 3
    bench.tell(flight, finish(device_s=0.5, prefill_s=1e9, rejected_s=1e9, recomputed_s=1e9, energy_j=1e9))
    receipt = flight.log.receipts[0]
    assert (receipt.prefill_s, receipt.rejected_s, receipt.recomputed_s) == (0.5, 0.5, 0.5)
    assert receipt.energy_j == 0.5 * MAX_DEVICE_WATTS
    flight.epoch, flight.log.claimed_at = 1, bench.now
    bench.tell(flight, finish(device_s=0.0, prefill_s=1.0, energy_j=1e9))
    assert (flight.log.receipts[1].prefill_s, flight.log.receipts[1].energy_j) == (0.0, 0.0)


def test_worker_that_does_not_say_what_devices_it_has_has_one() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.tell(flight, finish(device_s=100.0, num_devices=64))
    assert bench.usage.device_s == pytest.approx(1.0)


def test_nobody_without_a_tenant_pushes_out_requests_of_tenants() -> None:
    bench = Bench(max_kept=1000)
    bench.end(None, bench.timeline("mine"))
    for number in range(1100):
        bench.end(None, bench.timeline(f"n{number}", tenant="", status=401, outcome="refused"))
    assert bench.only("mine").tenant == "t"
    refused = [each.id for each in bench.keeper.summaries("failed", 2000)]
    assert len(refused) == MAX_WITHOUT_TENANT
    assert bench.keeper.find("n1099")


def test_room_is_shared_among_tenants() -> None:
    bench = Bench(max_kept=10)
    for name in ("a0", "a1", "a2"):
        bench.end(None, bench.timeline(name, tenant="a"))
    for number in range(50):
        bench.end(None, bench.timeline(f"b{number}", tenant="b"))
    kept = {each.id for each in bench.keeper.summaries("recent", 100)}
    assert kept == {"a0", "a1", "a2", *(f"b{number}" for number in range(43, 50))}


def test_tenant_with_most_requests_loses_its_oldest_whatever_came_before() -> None:
    bench, draw, kept = Bench(max_kept=20), random.Random(3), list[tuple[str, str]]()
    for number in range(400):
        tenant = f"t{int(draw.paretovariate(1)) % 9}"
        bench.end(bench.begin(f"r{number}", tenant), bench.timeline(f"r{number}", tenant))
        kept.append((tenant, f"r{number}"))
        if len(kept) > 20:
            most = max(Counter(tenant for tenant, _ in kept).values())
            gone = [each for each in kept if not bench.keeper.find(each[1])]
            assert len(gone) == 1
            assert [tenant for tenant, _ in kept].count(gone[0][0]) == most
            assert gone[0] == next(each for each in kept if each[0] == gone[0][0])
            kept.remove(gone[0])


def test_many_tenants_make_no_request_dearer() -> None:
    def cost_s(num_tenants: int) -> float:
        bench = Bench(max_kept=2000)
        told = [bench.timeline(f"r{number}", f"t{number % num_tenants}") for number in range(3000)]
        for timeline in told[:2000]:
            bench.end(None, timeline)
        begun = time.thread_time()
        for timeline in told[2000:]:
            bench.end(None, timeline)
        return time.thread_time() - begun

    assert cost_s(2000) < 8 * cost_s(2)


@pytest.mark.parametrize("are_at_once", [True, False])
def test_requests_of_one_id_are_all_kept_with_their_own_sequences(are_at_once: bool) -> None:
    bench = Bench()
    flights = [bench.begin(worker="w0")]
    if are_at_once:
        flights.append(bench.begin(worker="w1"))
        bench.flights = flights
        assert [each.sequences[0].attempts[0].worker for each in bench.keeper.find("r")] == ["w1", "w0"]
    for number in range(2):
        if number == len(flights):
            flights.append(bench.begin(worker="w1"))
        bench.tell(flights[number], finish(device_s=0.25 * (number + 1)), f"w{number}")
        bench.keeper.sequence_ended(flights[number], "completed", finish())
        bench.end(flights[number], bench.timeline(completion_tokens=number))
    found = [(each.completion_tokens, each.sequences[0].attempts[0]) for each in bench.keeper.find("r")]
    told = [(tokens, each.worker, each.receipt and each.receipt.device_s) for tokens, each in found]
    assert told == [(1, "w1", 0.5), (0, "w0", 0.25)]


def test_sequence_that_ends_after_its_answer_is_added() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.end(flight, bench.timeline())
    assert bench.only().sequences == []
    bench.keeper.sequence_ended(flight, "completed", finish())
    assert [each.id for each in bench.only().sequences] == [flight.id]


def test_request_that_runs_is_told_as_far_as_it_is() -> None:
    bench = Bench()
    flight = bench.begin()
    bench.flights = [flight]
    bench.now += 2
    told = bench.only()
    assert told.outcome == "running"
    assert told.sequences[0].attempts[0].claimed_s == pytest.approx(0)


def test_two_tenants_may_use_one_id() -> None:
    bench = Bench()
    for tenant in ("a", "b"):
        flight = bench.begin(tenant=tenant)
        bench.keeper.sequence_ended(flight, "completed", finish())
        bench.end(flight, bench.timeline(tenant=tenant))
    assert [(each.tenant, len(each.sequences)) for each in bench.keeper.find("r")] == [("b", 1), ("a", 1)]


def test_what_is_kept_is_bounded_in_number_and_in_bytes() -> None:
    bench = Bench(max_kept=10)
    for number in range(50):
        flights = [bench.begin(f"r{number}")] * (MAX_SEQUENCES + 4)
        for flight in flights:
            bench.keeper.sequence_ended(flight, "completed", finish())
        bench.end(flights[0], bench.timeline(f"r{number}"))
    assert bench.keeper.find("r0") == []
    assert len(bench.keeper.summaries("recent", 100)) == 10
    last = bench.only("r49")
    assert (len(last.sequences), last.left_out) == (MAX_SEQUENCES, 4)
    parts = tuple(PrefillPart(1.0, 1.0, 7) for _ in range(64))
    flight = bench.begin("long")
    for epoch in range(40):
        flight.epoch = epoch
        flight.log.receipts[epoch] = Receipt(taken=0.0, prefills=parts)
        flight.log.end(flight.attempt_ended("silent", bench.now))
    for _ in range(MAX_SEQUENCES):
        bench.keeper.sequence_ended(flight, "completed", finish())
    bench.end(flight, bench.timeline("long"))
    assert len(msgspec.msgpack.encode(bench.only("long"))) <= MAX_TIMELINE_BYTES
    assert (len(bench.only("long").sequences), bench.only("long").left_out) == (1, MAX_SEQUENCES - 1)


@pytest.mark.parametrize(("num_attempts", "num_shown"), [(1, MAX_SEQUENCES), (4, 2)])
def test_sequences_that_end_after_a_long_request_are_bounded_too(num_attempts: int, num_shown: int) -> None:
    """In number, and in bytes: where they are too long, some are shown all the same."""
    bench = Bench()
    flight, parts = bench.begin(), tuple(PrefillPart(1.0, 1.0, 7) for _ in range(64))
    bench.end(flight, bench.timeline())
    for flight.epoch in range(num_attempts):
        flight.log.receipts[flight.epoch] = Receipt(taken=0.0, prefills=parts)
        if flight.epoch < num_attempts - 1:
            flight.log.end(flight.attempt_ended("silent", bench.now))
    for _ in range(MAX_SEQUENCES + 4):
        bench.keeper.sequence_ended(flight, "completed", finish())
    told = bench.only()
    assert num_shown <= len(told.sequences) <= MAX_SEQUENCES
    assert len(told.sequences) + told.left_out == MAX_SEQUENCES + 4
    assert len(msgspec.msgpack.encode(told)) <= MAX_TIMELINE_BYTES


def test_requests_of_long_ago_are_let_go() -> None:
    bench = Bench()
    bench.end(None, bench.timeline("old"))
    bench.now += KEPT_S + 1
    bench.end(None, bench.timeline("new"))
    assert [each.id for each in bench.keeper.summaries("recent", 10)] == ["new"]
    assert bench.keeper.find("old") == []


def test_lists_have_the_slowest_or_the_failed_first() -> None:
    bench = Bench()
    for name, ended_s, status in (("a", 1.0, 200), ("b", 9.0, 200), ("c", 2.0, 503)):
        outcome, error = ("completed", None) if status == 200 else ("refused", "overloaded: later")
        bench.end(None, bench.timeline(name, ended_s=ended_s, status=status, outcome=outcome, error=error))
    assert [(each.id, each.code) for each in bench.keeper.summaries("slow", 2)] == [("b", ""), ("c", "overloaded")]
    assert [each.id for each in bench.keeper.summaries("failed", 10)] == ["c"]


def test_list_of_running_requests_has_the_oldest_first_and_no_others() -> None:
    bench = Bench()
    bench.end(bench.begin("ended"), bench.timeline("ended"))
    for name in ("old", "new"):
        bench.flights.append(bench.begin(name))
    for seen, ended_s in zip(bench.running.values(), (9.0, 2.0), strict=True):
        seen.told = msgspec.structs.replace(seen.told, ended_s=ended_s)
    assert [each.id for each in bench.keeper.summaries("running", 10)] == ["old", "new"]
    assert [each.id for each in bench.keeper.summaries("recent", 10)] == ["ended"]


def test_list_of_running_requests_looks_once_at_each_flight() -> None:
    bench = Bench()
    bench.flights += [bench.begin(str(number)) for number in range(50)]
    num_looks = 0

    def flights() -> Iterator[Flight]:
        nonlocal num_looks
        for flight in bench.flights:
            num_looks += 1
            yield flight

    bench.keeper._flights = flights
    assert len(bench.keeper.summaries("running", 100)) == num_looks == 50


def test_list_by_first_tokens_has_what_waited_longest_first() -> None:
    bench = Bench()
    for name, first_token_s, ended_s in (("long", 0.1, 60.0), ("late", 20.0, 21.0), ("never", None, 30.0)):
        bench.end(None, bench.timeline(name, ended_s=ended_s, first_token_s=first_token_s))
    assert [each.id for each in bench.keeper.summaries("first", 10)] == ["never", "late", "long"]


def test_nothing_is_kept_where_nothing_is_wanted_and_use_counts_all_the_same() -> None:
    bench = Bench(max_kept=0)
    flight = bench.begin()
    bench.tell(flight, finish())
    bench.keeper.sequence_ended(flight, "completed", finish())
    bench.end(flight, bench.timeline(sequences=[SequenceLife("x", [])]))
    assert (bench.keeper.find("r"), bench.usage.tenants) == ([], ["t"])
