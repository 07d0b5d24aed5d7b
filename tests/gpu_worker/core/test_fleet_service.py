"""Tenants are served alike by a fleet, and by a worker that has just started, whatever others tell."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpu_worker.core.fleet_service import HeardServices
from gpu_worker.core.sequence import Sequence, SequenceStatus
from shared.services import MAX_AHEAD, MAX_TENANTS, Services, TenantService
from tests.gpu_worker.core.harness import Harness
from tests.gpu_worker.core.sequences import make_sequence

PROMPT, OUTPUT = 12, 2


class Worker:
    """A scheduler whose tenants always have requests waiting, and what it has served them, by its plans."""

    def __init__(self, *tenants: str) -> None:
        self.tenants = tenants
        self.harness = Harness(num_blocks=64, max_num_seqs=3, max_num_batched_tokens=12, headroom_tokens=OUTPUT)
        self.served: dict[str, int] = dict.fromkeys(tenants, 0)
        self._sequences: list[Sequence] = []

    def step(self) -> None:
        self._sequences = [each for each in self._sequences if each.status is not SequenceStatus.FINISHED]
        for tenant in self.tenants:
            waiting = [s for s in self._sequences if s.tenant == tenant and s.status is not SequenceStatus.RUNNING]
            for _ in range(3 - len(waiting)):
                self.harness.add(sequence := make_sequence(PROMPT, max_tokens=OUTPUT, ignore_eos=True, tenant=tenant))
                self._sequences.append(sequence)
        plan = self.harness.schedule()
        for item in plan.scheduled:
            self.served[item.sequence.tenant] += item.num_tokens
        self.harness.land()

    def exchange(self, heard: HeardServices | None = None) -> tuple[TenantService, ...]:
        told = self.harness.scheduler.exchange_services({} if heard is None else {"interactive": heard})
        return told.get("interactive", ())


def sums(services: Iterable[TenantService]) -> dict[str, float]:
    return {service.tenant: service.served for service in services}


def test_tenant_that_has_a_worker_for_itself_gets_little_of_the_one_that_another_needs() -> None:
    one, two = Worker("a"), Worker("a", "b")
    before: dict[str, float] = {}
    for _ in range(300):
        one.step()
        two.step()
        now = sums(one.exchange())
        two.exchange(HeardServices({tenant: now[tenant] - before.get(tenant, 0.0) for tenant in now}))
        before = now
    assert two.served["b"] > 0.85 * sum(two.served.values())


@pytest.mark.parametrize("lie", [1e6, 1e14])
def test_whatever_others_tell_every_tenant_goes_on_being_served(lie: float) -> None:
    worker = Worker("a", "b", "c")
    for _ in range(600):
        worker.step()
        worker.exchange(HeardServices({"a": lie, **{f"made-up-{n}": lie for n in range(MAX_TENANTS - 1)}}))
    # An eighth of what each of the others gets.
    assert worker.served["a"] > max(worker.served.values()) / 10


def test_what_others_tell_counts_for_nothing_where_a_tenant_is_in_nobodys_way() -> None:
    worker = Worker("a")
    for _ in range(50):
        worker.step()
        worker.exchange(HeardServices({"a": 1e6}))
    worker.tenants = ("a", "b")
    worker.served = dict.fromkeys("ab", 0)
    for _ in range(50):
        worker.step()
    assert 0.4 < worker.served["a"] / sum(worker.served.values()) < 0.6


@pytest.mark.parametrize("tenants", ["ab", "ba"])
@pytest.mark.parametrize("is_late", [False, True])
def test_worker_that_starts_serves_who_was_behind_until_that_is_made_up_for(tenants: str, is_late: bool) -> None:
    worker, ahead = Worker(*tenants), 300.0
    if is_late:
        worker.step()
    worker.exchange(HeardServices(ahead={"a": ahead, "b": 0.0}))
    while worker.served["b"] + worker.served["a"] < 2 * ahead:
        worker.step()
    # An output token counts twice: a prompt of 12 with two is 16 virtual tokens.
    difference = (worker.served["b"] - worker.served["a"]) * 16 / 14
    assert ahead - 64 < difference < ahead + 64


def test_what_was_taken_over_fades_so_that_nobody_saves_it_up() -> None:
    worker = Worker("a", "b")
    worker.exchange(HeardServices(ahead={"a": 300.0, "b": 0.0}))
    for _ in range(200):
        worker.step()
    worker.tenants, worker.served = ("a", "b", "c"), dict.fromkeys("abc", 0)
    for _ in range(100):
        worker.step()
    assert max(worker.served.values()) - min(worker.served.values()) <= 3 * (PROMPT + OUTPUT)


def test_how_far_a_tenant_is_ahead_is_told_until_it_is_made_up_for() -> None:
    worker = Worker("a", "b")
    assert worker.exchange(HeardServices(ahead={"a": 1e9, "b": 0.0})) == (TenantService("a", 0.0, MAX_AHEAD),)
    worker.step()
    told = {service.tenant: service for service in worker.exchange()}
    assert MAX_AHEAD - 50 < told["a"].ahead <= MAX_AHEAD
    assert told["b"].ahead == 0.0
    assert told["b"].served > 0.0


def test_lone_tenant_is_told_of_too_and_lanes_are_told_apart() -> None:
    harness = Harness()
    harness.add(make_sequence(8, max_tokens=4, ignore_eos=True, tenant="a"))
    harness.add(make_sequence(8, max_tokens=4, ignore_eos=True, tenant="b", lane="batch"))
    harness.run()
    told: Services = harness.scheduler.exchange_services({})
    # Eight tokens of the prompt, and three of four generated ones: the last is never computed.
    assert told == {"interactive": (TenantService("a", 14.0),), "batch": (TenantService("b", 14.0),)}


def test_those_served_last_are_told_where_there_are_too_many() -> None:
    harness = Harness()
    for number in range(MAX_TENANTS + 5):
        harness.add(make_sequence(4, max_tokens=1, tenant=f"t{number}"))
    harness.run()
    told = [service.tenant for service in harness.scheduler.exchange_services({})["interactive"]]
    assert told == [f"t{number}" for number in reversed(range(5, MAX_TENANTS + 5))]
