"""What is retained stays within the capacity, within quotas by weight where others ask, and within its time."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.eviction_order import MAX_EXPIRED, EvictionOrder
from gpu_worker.core.retention import Retention


def used_by(retention: Retention, tenant: str) -> float:
    return sum(grant.cost for grant in retention._grants.values() if grant.tenant.name == tenant)


def names(tenant: str, *numbers: int) -> list[bytes]:
    return [f"{tenant}{number}".encode() for number in numbers]


ASKS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["a", "b", "c"]),
        "first": st.integers(0, 30),
        "count": st.integers(0, 40),
        "seconds": st.integers(1, 50),
        "pause": st.integers(0, 20),
    }
)
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}
CAPACITY = 20


@settings(max_examples=150)
@given(asks=st.lists(ASKS, max_size=30), evicted=st.lists(st.integers(0, 69)))
def test_nobody_holds_the_room_of_another_or_anything_for_ever(asks: list[dict[str, Any]], evicted: list[int]) -> None:
    retention, now = Retention(CAPACITY), 0.0
    until: dict[bytes, float] = {}
    for number, ask in enumerate(asks):
        now += ask["pause"]
        gone = retention.expire(now)
        assert not any(digest in retention for digest in gone)
        tenant, ends = ask["tenant"], now + ask["seconds"]
        digests = names(tenant, *range(ask["first"], ask["first"] + ask["count"]))
        held = {name: used_by(retention, name) for name in WEIGHTS}
        let_go = retention.retain(tenant, WEIGHTS[tenant], digests, ends)
        until |= {digest: max(ends, until.get(digest, 0.0)) for digest in digests}
        assert retention.used == len(retention) <= CAPACITY
        assert not any(digest in retention and until[digest] <= now for digest in until)
        # Whoever asks for its quota gets it, whatever the others hold, who lose nothing of their own.
        competing = {name for name in WEIGHTS if held[name] or name == tenant}
        quota = {name: CAPACITY * WEIGHTS[name] / sum(map(WEIGHTS.__getitem__, competing)) for name in competing}
        asked = sum(digest in retention or digest in let_go for digest in digests)
        assert used_by(retention, tenant) >= min(int(quota[tenant]), asked)
        for other in competing - {tenant}:
            assert used_by(retention, other) >= min(held[other], int(quota[other]))
        if evicted and number < len(evicted):
            retention.discard(f"{tenant}{evicted[number]}".encode())
    retention.expire(now + 50)
    assert (len(retention), retention.used) == (0, 0)
    assert not retention._tenants


def test_of_a_prefix_that_does_not_fit_the_beginning_is_retained() -> None:
    retention = Retention(3)
    assert retention.retain("a", 1.0, names("a", 0, 1, 2, 3, 4), 10.0) == []
    assert [digest in retention for digest in names("a", 0, 1, 2, 3)] == [True, True, True, False]


def test_a_tenant_gives_back_what_it_holds_above_its_quota_the_end_first() -> None:
    retention = Retention(6)
    retention.retain("a", 1.0, names("a", *range(6)), 10.0)
    assert retention.retain("b", 2.0, names("b", *range(9)), 5.0) == names("a", 5, 4, 3, 2)
    assert (used_by(retention, "a"), used_by(retention, "b")) == (2, 4)


def test_within_a_tenant_the_latest_deadlines_stay() -> None:
    retention = Retention(4)
    retention.retain("a", 1.0, names("a", 0, 1), 10.0)
    retention.retain("a", 1.0, names("a", 2, 3), 20.0)
    assert retention.retain("a", 1.0, names("a", 4), 15.0) == names("a", 1)
    assert retention.retain("a", 1.0, names("a", 5), 5.0) == []
    assert names("a", 5)[0] not in retention
    assert sorted(retention.expire(15.0)) == names("a", 0, 4)


def test_a_later_deadline_replaces_an_earlier_one_only() -> None:
    retention = Retention(4)
    retention.retain("a", 1.0, names("a", 0), 10.0)
    retention.retain("a", 1.0, names("a", 0), 5.0)
    assert retention.expire(9.0) == []
    retention.retain("a", 1.0, names("a", 0), 20.0)
    assert (retention.expire(19.0), retention.used) == ([], 1)
    assert retention.expire(20.0) == names("a", 0)


def test_choices_that_end_within_a_second_move_nothing_anew() -> None:
    retention = Retention(4)
    retention.retain("a", 1.0, names("a", 0, 1), 10.2)
    first = retention._grants[b"a0"]
    for later in (10.3, 10.9, 11.0):
        retention.retain("a", 1.0, names("a", 0, 1, 2), later)
    assert retention._grants[b"a0"] is first
    assert (retention.expire(10.99), retention.expire(11.0)) == ([], names("a", 1, 0, 2))


def test_a_million_renewals_leave_no_trace() -> None:
    retention = Retention(4)
    for number in range(5_000):
        retention.retain("a", 1.0, names("a", 0), 10.0 + number)
    assert len(retention._tenants["a"].heap) < 200


@pytest.mark.parametrize("is_retained", [True, False])
def test_what_is_retained_is_evicted_last_and_only_while_it_is(is_retained: bool) -> None:
    order = EvictionOrder(Retention(2 if is_retained else 0))
    for digest in names("a", 1, 0):
        order.add(digest)
    order.retain("a", 1.0, names("a", 0, 1), 10.0)
    order.add(b"other")
    expected = [b"other", *names("a", 1, 0)] if is_retained else [*names("a", 1, 0), b"other"]
    assert list(order) == expected
    order.expire(10.0)
    # From then on it is one of all; of a prefix the end goes first.
    assert [order.pop() for _ in range(4)] == [*expected, None]
    assert order.retention.used == 0


def test_what_is_spent_goes_before_all_others_even_if_it_was_retained() -> None:
    order = EvictionOrder(Retention(4))
    for digest in (b"other", *names("a", 1, 0)):
        order.add(digest)
    order.retain("a", 1.0, names("a", 0, 1), 10.0)
    order.spend(names("a", 0, 1))
    assert list(order) == [*names("a", 1, 0), b"other"]
    assert len(order.retention) == 0


def test_very_many_that_expire_at_once_do_so_over_several_steps() -> None:
    digests = [b"%d" % number for number in range(MAX_EXPIRED + 10)]
    order = EvictionOrder(Retention(len(digests)))
    order.retain("a", 1.0, digests, 10.0)
    left = []
    for _ in range(3):
        order.expire(10.0)
        left.append(len(order.retention))
    assert left == [10, 0, 0]
    assert order.retention.next_expiry == math.inf
