"""The small pieces of state behind the lanes.

Deliveries are read as the NATS client reads them, which is the oracle here, whatever the subject looks like.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.errors import NotJSMessageError

from gpu_worker.consumer import gateway_watch
from gpu_worker.consumer.gateway_watch import GIVE_UP_S, MAX_GATEWAYS, SILENCE_S, Cancellations, GatewayWatch
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.queued_message import QueuedMessage, delivery, queued_message
from gpu_worker.core.scheduler_config import SchedulerConfig, WindowConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from shared.messages import Lane, Request
from shared.sampling import Sampling

MESSAGE = QueuedMessage("s", b"", "a", 1, 1, 0)


def _hold(
    held: HeldRequests, key: str, num_blocks: int = 0, lane: Lane = "interactive", tenant: str = ""
) -> HeldRequest:
    request = HeldRequest(key, Request(id=key, model="m", text="x", lane=lane, tenant=tenant), MESSAGE)
    held.add(request)
    held.expect_blocks(request, num_blocks)
    return request


def _begin(held: HeldRequests, key: str, num_blocks: int = 0, tenant: str = "") -> HeldRequest:
    request = _hold(held, key, num_blocks, tenant=tenant)
    request.sequence = Sequence(key, [1], 1, Sampling(), 1, status=SequenceStatus.RUNNING)
    held.by_sequence[key] = request
    return request


def _capacity(held: HeldRequests, max_num_seqs: int = 16, num_blocks: int = 100) -> PullCapacity:
    config = SchedulerConfig(
        block_size=16, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=2048
    )
    return PullCapacity(held, config)


async def test_pull_capacity_is_the_free_slots_and_no_more() -> None:
    held = HeldRequests()
    capacity = _capacity(held)
    assert capacity.interactive(0) == 16
    for index in range(16):
        _hold(held, str(index))
    assert capacity.interactive(0) == 0
    assert capacity.interactive(1) == 1
    assert capacity.interactive(1000) == 2
    _hold(held, "ahead-1")
    _hold(held, "ahead-2")
    assert capacity.interactive(1000) == 0


async def test_full_worker_pulls_a_few_more_for_whom_tenants_with_more_than_their_share_give_way() -> None:
    held = HeldRequests()
    capacity = _capacity(held)
    assert capacity.first(0) == 16
    greedy = [_begin(held, str(index), 4, tenant="greedy") for index in range(40)]
    assert (capacity.interactive(0), capacity.first(0), capacity.first(1000)) == (0, 2, 2)
    # With one of theirs, and one that may still come, there are three tenants: six of 16 slots are left.
    for index in range(10):
        _begin(held, f"polite {index}", 4, tenant="polite")
    assert capacity.first(0) == 2
    for index in range(20):
        _begin(held, f"third {index}", tenant=f"third {index}")
    assert capacity.first(0) == 0
    for request in greedy:
        held.remove(request)
    assert "greedy" not in held._of_tenants


@pytest.mark.parametrize(("max_num_seqs", "num_tenants"), [(16, 1), (16, 3), (64, 1)])
async def test_full_worker_pulls_no_more_from_a_queue_that_goes_first_while_what_it_pulled_has_not_begun(
    max_num_seqs: int, num_tenants: int
) -> None:
    held = HeldRequests()
    capacity = _capacity(held, max_num_seqs, num_blocks=100_000)
    num_pulled = 0
    while (room := capacity.first(1000)) > 0 and num_pulled < 1000:
        for _ in range(room):
            # Those with a slot begin, and none ends.
            hold = _begin if num_pulled < max_num_seqs else _hold
            hold(held, str(num_pulled), tenant=f"{num_pulled % num_tenants}")
            num_pulled += 1
    assert num_pulled == max_num_seqs + 2 * (max_num_seqs // 8)
    # One begins whose tenant had less than its share.
    held.remove(next(each for each in held if each.is_waiting))
    _begin(held, "polite", tenant="polite")
    assert capacity.first(1000) == 1


async def test_blocks_beyond_a_tenants_share_are_pulled_for_too() -> None:
    held = HeldRequests()
    capacity = _capacity(held)
    for _ in range(100):
        capacity.expected_blocks(192, 10_000)
    _begin(held, "greedy", 100, tenant="greedy")
    assert (capacity.interactive(0), capacity.first(0)) == (0, 2)
    _hold(held, "polite", 40, tenant="polite")
    # A third of 100 blocks is left, and a request has needed 20.
    assert capacity.first(0) == 1


async def test_pull_capacity_is_bounded_by_blocks_of_windows() -> None:
    held = HeldRequests()
    # Five blocks hold a window of 64 tokens wherever it begins.
    windows = (WindowConfig(64, 30),)
    capacity = PullCapacity(held, SchedulerConfig(16, 1000, 16, 64, 2048, windows=windows))
    for _ in range(100):
        capacity.expected_blocks(300, 100)
    assert capacity.interactive(0) == 6
    for index in range(4):
        _hold(held, str(index), 25)
    assert capacity.interactive(0) == 2


async def test_pull_capacity_is_bounded_by_blocks_as_requests_have_needed_them() -> None:
    held = HeldRequests()
    capacity = _capacity(held)
    for _ in range(100):
        assert capacity.expected_blocks(192, 10_000) == 20
    _hold(held, "a", 20)
    assert capacity.interactive(0) == 4
    _hold(held, "b", 70)
    assert capacity.interactive(0) == 0


async def test_idle_worker_takes_one_request_however_large_requests_were() -> None:
    held = HeldRequests()
    capacity = _capacity(held)
    for _ in range(100):
        capacity.expected_blocks(100_000, 1)
    assert capacity.interactive(0) == 1


async def test_batch_work_does_not_count_for_interactive_requests_but_the_other_way_round() -> None:
    held = HeldRequests()
    capacity = _capacity(held)
    for index in range(10):
        _hold(held, f"b{index}", 5, "batch")
    assert capacity.interactive(0) == 16
    assert capacity.batch(0, 16) == 6
    assert capacity.batch(3, 16) == 0
    for index in range(6):
        _hold(held, f"i{index}", 5)
    assert capacity.batch(0, 16) == 0


async def test_no_more_batch_requests_are_held_than_can_run_soon() -> None:
    held = HeldRequests()
    capacity = _capacity(held, max_num_seqs=64)
    assert [capacity.batch(0, limit) for limit in (1, 8, 64)] == [2, 10, 64]
    for index in range(9):
        _hold(held, f"b{index}", 1, "batch")
    assert [capacity.batch(0, limit) for limit in (1, 8, 64)] == [0, 1, 55]


@given(st.lists(st.tuples(st.sampled_from(["interactive", "batch"]), st.integers(0, 9))))
def test_counts_return_to_zero_when_everything_is_removed(requests: list[tuple[Lane, int]]) -> None:
    held = HeldRequests()
    entries = [_hold(held, str(index), blocks, lane) for index, (lane, blocks) in enumerate(requests)]
    assert held.num_blocks("batch") == sum(blocks for lane, blocks in requests if lane == "batch")
    for entry in entries:
        assert not held.is_empty.is_set()
        held.remove(entry)
    assert held.is_empty.is_set()
    for lane in ("interactive", "batch"):
        assert held.count(lane) == held.num_blocks(lane) == 0


def test_cancellation_covers_its_epoch_and_older_ones() -> None:
    cancellations = Cancellations()
    cancellations.add("r", 2, 0.0)
    assert cancellations.covers("r", 2, 1.0)
    assert not cancellations.covers("r", 3, 1.0)
    cancellations.add("r", 1, 1.0)
    assert cancellations.covers("r", 2, 1.0)
    assert not cancellations.covers("r", 3, 1.0)
    cancellations.add("r", None, 2.0)
    cancellations.add("r", 3, 3.0)
    assert cancellations.covers("r", 99, 3.0)
    assert not cancellations.covers("other", 0, 3.0)


def test_cancellations_are_forgotten_by_number_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_watch, "MAX_REMEMBERED", 3)
    cancellations = Cancellations()
    for index in range(5):
        cancellations.add(str(index), None, float(index))
    assert [cancellations.covers(str(index), 0, 5.0) for index in range(5)] == [False, False, True, True, True]
    assert not cancellations.covers("4", 0, 4.0 + gateway_watch.MEMORY_S + 1)


def test_only_gateways_that_were_heard_can_die() -> None:
    watch = GatewayWatch()
    watch.note_heartbeat("hr.gateway.a", 0.0)
    watch.review(SILENCE_S)
    assert not watch.is_silent("hr.tok.a")
    watch.review(SILENCE_S + 1)
    assert watch.is_silent("hr.tok.a")
    assert not watch.is_silent("hr.tok.b")
    watch.review(GIVE_UP_S)
    assert not watch.is_given_up("hr.tok.a")
    watch.review(GIVE_UP_S + 1)
    assert watch.is_given_up("hr.tok.a")
    watch.restart(300.0)
    assert not watch.is_silent("hr.tok.a")
    watch.review(300.0 + SILENCE_S)
    assert not watch.is_silent("hr.tok.a")
    watch.review(301.0 + SILENCE_S)
    assert watch.is_silent("hr.tok.a")


def test_silent_gateway_that_is_heard_again_is_not_silent_before_the_next_review() -> None:
    watch = GatewayWatch()
    watch.note_heartbeat("hr.gateway.a", 0.0)
    watch.review(GIVE_UP_S + 1)
    watch.note_heartbeat("hr.gateway.a", GIVE_UP_S + 2)
    assert not watch.is_silent("hr.tok.a")
    assert not watch.is_given_up("hr.tok.a")


def test_gateways_that_are_made_up_push_out_the_one_silent_for_longest() -> None:
    watch = GatewayWatch()
    for number in range(MAX_GATEWAYS):
        watch.note_heartbeat(f"hr.gateway.g{number}", float(number))
    watch.note_heartbeat("hr.gateway.g0", 5000.0)
    watch.note_heartbeat("hr.gateway.new", 5000.0)
    watch.review(10_000.0)
    assert watch.is_silent("hr.tok.g0")
    assert watch.is_silent("hr.tok.new")
    assert not watch.is_silent("hr.tok.g1")  # forgotten, and so not known to be silent


def test_gateway_that_is_pushed_out_is_silent_no_longer() -> None:
    watch = GatewayWatch()
    watch.note_heartbeat("hr.gateway.a", 0.0)
    watch.review(SILENCE_S + 1)
    assert watch.is_silent("hr.tok.a")
    for number in range(MAX_GATEWAYS):
        watch.note_heartbeat(f"hr.gateway.g{number}", SILENCE_S + 1)
    assert not watch.is_silent("hr.tok.a")


def test_gateway_of_long_ago_is_forgotten_with_the_next_pause() -> None:
    watch = GatewayWatch()
    watch.note_heartbeat("hr.gateway.a", 0.0)
    watch.note_heartbeat("hr.gateway.b", 900.0)
    watch.restart(1000.0)
    watch.review(1000.0 + SILENCE_S + 1)
    assert (watch.is_silent("hr.tok.a"), watch.is_silent("hr.tok.b")) == (False, True)


COUNT = st.integers(min_value=0, max_value=2**63 - 1).map(str)
NAME = st.text("abcXYZ_-019", min_size=1, max_size=9)
NUMBERS = st.tuples(COUNT, COUNT, COUNT, st.just("1763830000123456789"), COUNT).map(".".join)


def message(reply: str) -> Msg:
    nobody: Any = None
    return Msg(nobody, subject="hr.req.m.interactive.t", reply=reply, data=b"payload")


@given(NAME, NAME, NUMBERS)
def test_delivery_is_read_as_the_client_reads_it(stream: str, consumer: str, numbers: str) -> None:
    _check(f"$JS.ACK.{stream}.{consumer}.{numbers}")


@given(NAME, NAME, NAME, NUMBERS, st.sampled_from(["", ".token", ".token.more"]))
def test_delivery_with_a_domain_is_read_as_the_client_reads_it(
    domain: str, stream: str, consumer: str, numbers: str, more: str
) -> None:
    _check(f"$JS.ACK.{domain}.account.{stream}.{consumer}.{numbers}{more}")


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "_INBOX_gateway.abc",
        "$JS.ACK",
        "$JS.NAK.s.c.1.2.3.4.5",
        "$JS.ACK.s.c.1.2.3.4",
        "$JS.ACK.d.s.c.1.2.3.4.5",
        "$JS.ACK.s.c.one.2.3.4.5",
    ],
)
def test_message_that_is_no_delivery_is_none(reply: str) -> None:
    with pytest.raises((NotJSMessageError, ValueError)):
        _ = message(reply).metadata
    assert queued_message(message(reply)) is None


def _check(reply: str) -> None:
    queued, expected = queued_message(message(reply)), message(reply).metadata
    assert queued is not None
    assert (queued.subject, queued.data, queued.ack_subject) == ("hr.req.m.interactive.t", b"payload", reply)
    read = (queued.stream_seq, queued.num_delivered, queued.num_pending)
    assert read == (expected.sequence.stream, expected.num_delivered, expected.num_pending)
    assert queued.stored_at == pytest.approx(expected.timestamp.timestamp(), abs=0.001)


def test_delivery_whose_time_is_no_number_of_this_world_is_none() -> None:
    # Another worker may say anything of what it grants.
    assert delivery("hr.req.m.interactive", b"", f"$JS.ACK.s.c.1.2.3.{'9' * 400}.5") is None
