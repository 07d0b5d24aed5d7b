"""Queues that a worker leaves to others: when they count as left, and what it does then."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from gpu_worker.consumer import roles
from gpu_worker.consumer.roles import FIRST_HELP_S, LEFT_S, MOST_HELP_S, LeftQueues
from shared.consumers import Deliveries
from shared.disaggregation import KvReady, Role, RoleNews, TakenQueue
from shared.messages import encode
from shared.sampling import Sampling
from shared.subjects import Queue, worker_subject
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway, wait_until

START = 1000.0
SETTINGS: dict[str, Any] = {
    "simulate": None,
    "num_threads": 1,
    "num_blocks": 256,
    "max_model_len": 2048,
    "max_num_batched_tokens": 64,
    "kv_host_bytes": 8_000_000,
}


def stands_still(made: LeftQueues, at: float, *, num_delivered: int = 7) -> float:
    """Let requests wait without a delivery until they count as left; return the time."""
    made.note("interactive", Deliveries(3, num_delivered), at)
    made.note("interactive", Deliveries(5, num_delivered), at + LEFT_S)
    return at + LEFT_S


def test_a_queue_is_left_where_requests_wait_and_none_is_delivered_for_long() -> None:
    made = LeftQueues()
    made.note("interactive", Deliveries(1, 0), START)
    made.note("interactive", Deliveries(1, 0), START + LEFT_S - 0.1)
    assert not made.helps(START + LEFT_S - 0.1)
    made.note("interactive", Deliveries(1, 0), START + LEFT_S)
    assert made.helps(START + LEFT_S)
    assert made.helps(START + LEFT_S + FIRST_HELP_S - 0.1)
    assert not made.helps(START + LEFT_S + FIRST_HELP_S)


@pytest.mark.parametrize("between", [Deliveries(9, 8), Deliveries(0, 7)])
def test_a_queue_that_moves_or_was_empty_is_not_left(between: Deliveries) -> None:
    made = LeftQueues()
    made.note("interactive", Deliveries(9, 7), START)
    made.note("interactive", between, START + 1)
    made.note("interactive", Deliveries(9, between.num_delivered), START + LEFT_S + 0.5)
    assert not made.helps(START + LEFT_S + 0.5)
    made.note("interactive", Deliveries(9, between.num_delivered), START + 2 * LEFT_S + 0.5)
    assert made.helps(START + 2 * LEFT_S + 0.5)


def test_each_queue_stands_still_by_itself() -> None:
    made = LeftQueues()
    both: tuple[TakenQueue, ...] = ("interactive", "resumed")
    for second in range(int(LEFT_S) + 2):
        for queue in both:
            made.note(queue, Deliveries(1, second if queue == "resumed" else 7), START + second)
    assert made.helps(START + LEFT_S + 1)


def test_what_was_seen_before_a_change_of_role_does_not_count() -> None:
    made = LeftQueues()
    made.note("interactive", Deliveries(1, 7), START)
    made.forget()
    made.note("interactive", Deliveries(1, 7), START + LEFT_S)
    assert not made.helps(START + LEFT_S)


def test_who_leaves_a_queue_again_and_again_delays_few_requests(caplog: pytest.LogCaptureFixture) -> None:
    made, now, seconds = LeftQueues(), START, []
    for _ in range(5):
        now = stands_still(made, now)
        until = next(now + tenth / 10 for tenth in range(10_000) if not made.helps(now + tenth / 10))
        seconds.append(round(until - now))
        now = until
    assert seconds == [FIRST_HELP_S, 2 * FIRST_HELP_S, 4 * FIRST_HELP_S, MOST_HELP_S, MOST_HELP_S]
    assert [record.help_s for record in caplog.records] == seconds  # type: ignore[attr-defined]
    now = stands_still(made, now + MOST_HELP_S)
    assert made.helps(now + FIRST_HELP_S - 1)
    assert not made.helps(now + FIRST_HELP_S + 1), "it was long ago"


async def worker_beside_a_liar(role: Role, lie: Role, make: MakeWorker, patch: pytest.MonkeyPatch) -> RunningWorker:
    """Start a worker, and announce another one that takes what it leaves, and takes nothing."""
    patch.setattr(roles, "HEARD_S", 60.0)
    patch.setattr(roles, "LEFT_S", 0.5)
    worker = await make(role=role, **SETTINGS)
    beat = await worker.wait_for_heartbeat(lambda beat: beat.roles is not None and bool(beat.roles.maker), 30)
    assert beat.roles is not None
    taken: tuple[TakenQueue, ...] = ("ready",) if lie == "decode" else ("interactive", "resumed")
    news = RoleNews(lie, taken, "127.0.0.1:9", beat.roles.maker)
    # Without prefixes it does not listen to others, so that no answer does not mean its end.
    made_up = msgspec.structs.replace(beat, worker="liar", roles=news, prefixes=None)
    await worker.nats.publish(worker_subject(beat.model, "liar"), encode(made_up))
    handover = worker.worker._handover
    assert handover is not None
    known = handover.roles
    await wait_until(lambda: "liar" in known._peers, 30)
    # Not before: without a company it would pull from all queues.
    known._started_at -= 60.0
    await wait_until(lambda: bool(known.left(time.monotonic())), 30)
    return worker


@pytest.mark.parametrize(
    ("role", "lie", "queue"),
    [("decode", "prefill", "interactive"), ("decode", "prefill", "resumed"), ("prefill", "decode", "ready")],
)
async def test_what_a_worker_announces_to_take_and_does_not_is_taken_from_beginning_to_end(
    role: Role,
    lie: Role,
    queue: Queue,
    make_worker: MakeWorker,
    gateway: TestGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = await worker_beside_a_liar(role, lie, make_worker, monkeypatch)
    request = gateway.request(sampling=Sampling(max_tokens=4, ignore_eos=True))
    if queue == "ready":
        request = msgspec.structs.replace(request, epoch=1, ready=KvReady(request.id, 0, worker.name))
    await gateway.publish_raw(encode(request), queue)
    answer = await gateway.answer(request.id, request.epoch).wait(30)
    assert set(answer.workers) == {worker.name}
    assert answer.finish.reason == "length", "it is not handed over to who takes nothing"
