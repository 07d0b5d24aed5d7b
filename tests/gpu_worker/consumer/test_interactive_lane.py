from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.queued_message import ACK, QueuedMessage
from shared.conversation import ChatMessage
from shared.messages import Usage, encode
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.subjects import request_subject
from tests.gpu_worker.consumer.harness import TOKENIZER, MakeWorker, RunningWorker, TestGateway, fresh_name, wait_until
from tests.gpu_worker.core.sequences import make_sequence

ENDLESS = Sampling(max_tokens=1500, ignore_eos=True)


async def test_request_is_claimed_then_answered_and_acknowledged(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.ask("import os", sampling=Sampling(max_tokens=5, ignore_eos=True))
    prompt_tokens = len(TOKENIZER.encode_text("import os"))
    claim = answer.deltas[0]
    assert (claim.seq, claim.token_ids, claim.text, claim.prompt_tokens) == (0, (), "", prompt_tokens)
    assert set(answer.workers) == {worker.name}
    assert [delta.seq for delta in answer.deltas[1:]] == [0, 1, 2, 3, 4]
    assert answer.text == TOKENIZER.decode(answer.token_ids)
    assert answer.finish.reason == "length"
    assert answer.finish.usage == Usage(prompt_tokens, 5, 0)
    await gateway.wait_until_acknowledged()


async def test_request_stays_in_the_queue_while_it_runs(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.publish(gateway.request(sampling=ENDLESS))
    await answer.wait_for_tokens(3)
    assert await gateway.num_queued() == 1


async def test_gateway_hears_of_a_preempted_stream_while_it_waits(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(num_blocks=30, simulate=2.0)
    lane, engine = worker.worker.consumer._interactive, worker.worker._engine
    sampling = Sampling(max_tokens=400, ignore_eos=True)
    answers = [await gateway.publish(gateway.request(text, sampling=sampling)) for text in ("x = ", "def f(")]
    # Both do not fit as a whole: one gives way when the pool is full. One that has not begun yet waits as well.
    await wait_until(lambda: engine.stats.num_preemptions > 0 and engine.stats.waiting == 1)
    for _ in range(2):
        step = engine.stats.step
        await wait_until(lambda: engine.stats.step > step + 3)  # noqa: B023
        await lane.tell_of_waiting()
    await wait_until(lambda: any(not answer.deltas[-1].token_ids for answer in answers))
    (waiting,) = (answer for answer in answers if not answer.deltas[-1].token_ids)
    last = waiting.deltas[-1]
    assert (last.seq, last.text, last.prompt_tokens, last.finish) == (len(waiting.token_ids), "", None, None)
    for answer in answers:
        assert (await answer.wait()).finish.reason == "length"
        assert len(answer.token_ids) == 400


async def test_nothing_is_said_of_requests_while_the_engine_stands_still(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, told = worker.worker.consumer._interactive, list[Any]()
    request = gateway.request()
    held = HeldRequest(request.id, request, QueuedMessage("s", b"", "r", stream_seq=1, num_delivered=1, num_pending=0))
    held.sequence = make_sequence([1])
    monkeypatch.setattr(lane, "_held", [held])
    monkeypatch.setattr(lane, "outbox", SimpleNamespace(put=lambda reply, delta, finished: told.append(delta)))
    engine = SimpleNamespace(stats=SimpleNamespace(step=1))
    monkeypatch.setattr(lane, "_engine", engine)
    await lane.tell_of_waiting()
    assert told == []  # it has only just come
    await lane.tell_of_waiting()
    assert told == []  # no step was made
    engine.stats.step = 2
    await lane.tell_of_waiting()
    assert [(delta.id, delta.seq) for delta in told] == [(request.id, 0)]
    held.num_output_tokens, engine.stats.step = 1, 3
    await lane.tell_of_waiting()
    assert len(told) == 1  # its token tells


async def test_deltas_of_one_step_share_one_frame(make_worker: MakeWorker, gateway: TestGateway) -> None:
    await make_worker(simulate=10.0)
    for _ in range(16):
        await gateway.publish(gateway.request(sampling=ENDLESS))
    # However far apart they began, they all run in the end.
    await wait_until(lambda: any(sum(map(bool, (d.token_ids for d in f.deltas))) == 16 for f in gateway.frames))
    frames = [frame for frame in gateway.frames if any(delta.token_ids for delta in frame.deltas)]
    assert set(Counter(frame.step for frame in frames).values()) == {1}


async def test_frames_go_only_to_the_gateway_that_asked(
    worker: RunningWorker, gateway: TestGateway, nats_url: str, model: str
) -> None:
    nats = await connect(nats_url, role="gateway", name="other")
    other = TestGateway(nats, model)
    await other.start()
    await asyncio.gather(gateway.ask(), other.ask())
    assert len(gateway.answers) == len(other.answers) == 1
    assert not set(gateway.answers) & set(other.answers)
    await nats.close()


async def test_cancelled_running_request_frees_its_blocks_at_once(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await make_worker(simulate=5.0)
    request = gateway.request("x " * 300, sampling=ENDLESS)
    answer = await gateway.publish(request)
    await answer.wait_for_tokens(2)
    engine, lane = worker.worker._engine, worker.worker.consumer._interactive
    cancel, steps = lane.cancel, list[int]()
    monkeypatch.setattr(lane, "cancel", lambda message: (cancel(message), steps.append(engine.stats.step)))
    await gateway.cancel(request.id)
    await wait_until(lambda: bool(steps))
    await wait_until(lambda: engine.stats.running == 0 and engine.stats.free_blocks == engine.stats.total_blocks)
    # The step in flight, the one that is being planned meanwhile, and the one that leaves it out.
    assert engine.stats.step - steps[0] <= 3
    await gateway.ask()
    # Its gateway, which waits for nothing more, is told what it has cost.
    assert answer.finish.reason == "cancelled"
    assert answer.finish.receipt.device_s > 0
    await gateway.wait_until_acknowledged()


async def test_cancellation_is_not_for_the_worker_that_it_names(make_worker: MakeWorker, gateway: TestGateway) -> None:
    worker = await make_worker(simulate=5.0)
    request = gateway.request(sampling=Sampling(max_tokens=100, ignore_eos=True))
    answer = await gateway.publish(request)
    await answer.wait_for_tokens(2)
    await gateway.cancel(request.id, epoch=0, keep=worker.name)
    assert (await answer.wait()).finish.reason == "length"
    again = gateway.request(sampling=ENDLESS)
    stopped = await gateway.publish(again)
    await stopped.wait_for_tokens(2)
    await gateway.cancel(again.id, epoch=0, keep="another worker")
    await gateway.wait_until_acknowledged()
    assert stopped.finish.reason == "cancelled"


async def test_cancelled_waiting_request_is_dropped(make_worker: MakeWorker, gateway: TestGateway) -> None:
    await make_worker(max_num_seqs=1)
    running = gateway.request(sampling=ENDLESS)
    await (await gateway.publish(running)).wait_for_tokens(1)
    waiting = gateway.request()
    answer = await gateway.publish(waiting)
    await gateway.cancel(waiting.id)
    await gateway.cancel(running.id)
    await gateway.ask()
    assert not any(delta.token_ids for delta in answer.deltas)
    await gateway.wait_until_acknowledged()


@pytest.mark.parametrize("is_silent", [False, True])
async def test_request_cancelled_before_it_is_pulled_is_acknowledged_unread(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """Also one of a gateway that is not heard, whose other requests wait for it."""
    request = gateway.request()
    await gateway.cancel(request.id)
    # Queue and cancellations come by different subscriptions: an answer shows that it has read what came before.
    await gateway.ask()
    if is_silent:
        monkeypatch.setattr(type(worker.worker.consumer._interactive.gateways), "is_silent", lambda *_: True)
    answer = await gateway.publish(request)
    await gateway.wait_until_acknowledged()
    monkeypatch.undo()
    await gateway.ask()
    assert answer.deltas == []


async def test_cancellation_of_an_old_epoch_leaves_the_new_one(worker: RunningWorker, gateway: TestGateway) -> None:
    request_id = fresh_name("r")
    answer = await gateway.publish(gateway.request(id=request_id, epoch=2, sampling=Sampling(max_tokens=50)))
    await answer.claimed.wait()
    await gateway.cancel(request_id, epoch=1)
    assert (await answer.wait()).finish.reason == "length"


async def test_interactive_queue_makes_a_request_interactive_whatever_it_says(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(max_num_seqs=1)
    request = gateway.request(lane="batch", sampling=ENDLESS)
    answer = await gateway.publish(request)
    await answer.wait_for_tokens(1)
    assert worker.worker.consumer._held.count("batch") == 0
    await gateway.cancel(request.id)
    await gateway.wait_until_acknowledged()


async def test_newer_epoch_replaces_the_older_one(worker: RunningWorker, gateway: TestGateway) -> None:
    request_id = fresh_name("r")
    old = await gateway.publish(gateway.request(id=request_id, sampling=ENDLESS))
    await old.wait_for_tokens(3)
    new = await gateway.publish(gateway.request(id=request_id, epoch=1, emitted=tuple(old.token_ids[:3])))
    await new.wait()
    assert [delta.epoch for delta in new.deltas] == [1] * len(new.deltas)
    assert new.deltas[0].seq == 3
    num_old = len(old.deltas)
    await gateway.ask()
    assert len(old.deltas) == num_old
    assert old.finish.reason == "cancelled"


async def test_older_epoch_and_duplicate_are_dropped(worker: RunningWorker, gateway: TestGateway) -> None:
    request_id = fresh_name("r")
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    current = await gateway.publish(gateway.request(id=request_id, epoch=1, sampling=sampling))
    await current.claimed.wait()
    old = await gateway.publish(gateway.request(id=request_id, epoch=0))
    await gateway.publish(gateway.request(id=request_id, epoch=1, sampling=sampling))
    await current.wait()
    await gateway.ask()
    assert old.deltas == []
    assert [delta.seq for delta in current.deltas] == [0, *range(60)]
    await gateway.wait_until_acknowledged()


async def test_request_that_is_delivered_twice_is_answered_at_its_last_delivery(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    request = gateway.request(sampling=Sampling(max_tokens=60, ignore_eos=True))
    inboxes = [gateway.nats.new_inbox() for _ in range(2)]
    acknowledged = [await gateway.nats.subscribe(inbox) for inbox in inboxes]
    await gateway.nats.flush()
    for number, inbox in enumerate(inboxes, start=1):
        message = QueuedMessage(
            request_subject(gateway.model, "interactive", "t"), encode(request), inbox, 7, number, 0
        )
        worker.worker.consumer._interactive.take(message)
    answer = await gateway.answer(request.id).wait()
    assert [delta.seq for delta in answer.deltas] == [0, *range(60)]
    assert (await acknowledged[1].next_msg(timeout=5)).data == ACK
    assert acknowledged[0].pending_msgs == 0


async def test_expired_request_is_told_so_without_running(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.ask(deadline=time.time() - 1, emitted=(5, 6))
    assert [delta.finish.reason for delta in answer.deltas if delta.finish] == ["expired"]
    # It goes on where the last attempt ended: the gateway would take anything else for a gap.
    assert [delta.seq for delta in answer.deltas] == [2]


async def test_deadline_ends_a_running_request(make_worker: MakeWorker, gateway: TestGateway) -> None:
    await make_worker(simulate=5.0)
    answer = await gateway.ask(deadline=time.time() + 1.0, sampling=ENDLESS)
    assert answer.finish.reason == "expired"
    assert len(answer.token_ids) > 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "x " * 3000}, "prompt"),
        ({"text": None, "messages": (ChatMessage(role="user", content="x " * 3000),)}, "messages"),
        ({"text": None, "token_ids": (5, 4096)}, "prompt"),
        ({"text": None, "token_ids": (2**62,)}, "token_ids"),
        ({"text": None, "token_ids": ()}, "prompt"),
        ({"text": None}, "prompt"),
        ({"text": None, "messages": ()}, "messages"),
        ({"text": "x", "token_ids": (5,)}, "prompt"),
        ({"emitted": (-1,)}, "emitted"),
        ({"sampling": Sampling(logit_bias={4096: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(stop_token_ids=(-5,))}, "stop_token_ids"),
        ({"model": "another"}, "model"),
    ],
)
async def test_request_that_can_never_run_fails_naming_the_field(
    worker: RunningWorker, gateway: TestGateway, fields: dict[str, Any], param: str
) -> None:
    answer = await gateway.ask(**fields)
    assert answer.finish.reason == "failed"
    assert answer.finish.error
    assert answer.finish.error_param == param
    assert (answer.finish.error_code == "context_length_exceeded") == ("x " * 3000 in str(fields))
    assert (await gateway.ask()).finish.reason == "length"
    await gateway.wait_until_acknowledged()


@pytest.mark.parametrize("reply", ["$X.{}", "hr.cancel.{}", "hr.tok.{}.x", "_INBOX_gateway.{}", "x.{}"])
async def test_reply_subject_that_is_no_gateways_hears_nothing(
    worker: RunningWorker, gateway: TestGateway, reply: str
) -> None:
    forged = reply.format(fresh_name("forged"))
    heard = await gateway.nats.subscribe(forged)
    await gateway.nats.flush()
    await gateway.publish(gateway.request(reply=forged))
    # Of this one only the envelope can be read.
    await gateway.publish_raw(encode(gateway.request(reply=forged)).replace(b"\xa4text", b"\xa4echo"))
    await gateway.ask()
    await gateway.wait_until_acknowledged()
    assert heard.pending_msgs == 0


async def test_chat_request_is_answered(worker: RunningWorker, gateway: TestGateway) -> None:
    messages = (ChatMessage(role="user", content="hello"),)
    answer = await gateway.ask(None, messages=messages)
    assert answer.deltas[0].prompt_tokens == len(TOKENIZER.encode_chat(messages).token_ids)
    assert answer.finish.reason == "length"


async def test_blocks_that_a_request_shares_are_not_counted_twice(worker: RunningWorker, gateway: TestGateway) -> None:
    held, expected = worker.worker.consumer._held, []
    prompt = fresh_name("p") + " def add(a, b):\n" * 20
    for num_running in (1, 2):
        answer = await gateway.publish(gateway.request(prompt, sampling=ENDLESS))
        await answer.wait_for_tokens(1)
        assert held.count("interactive") == num_running
        expected.append(held.num_blocks("interactive") - sum(expected))
    assert 1 <= expected[1] < expected[0]
    await gateway.cancel(*(request_id for request_id, _ in gateway.answers))
