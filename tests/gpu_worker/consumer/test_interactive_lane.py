from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared.messages import ChatMessage, Sampling, Usage
from shared.nats_connection import connect
from shared.streams import StreamLimits
from tests.gpu_worker.consumer.harness import TOKENIZER, RunningWorker, TestGateway, fresh_name, wait_until

MakeWorker = Callable[..., Awaitable[RunningWorker]]
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


async def test_deltas_of_one_step_share_one_frame(make_worker: MakeWorker, gateway: TestGateway) -> None:
    await make_worker(simulate=10.0)
    requests = [gateway.request(sampling=Sampling(max_tokens=20, ignore_eos=True)) for _ in range(16)]
    answers = [await gateway.publish(request) for request in requests]
    for answer in answers:
        await answer.wait()
    frames = [frame for frame in gateway.frames if any(delta.token_ids for delta in frame.deltas)]
    assert max(Counter(frame.step for frame in frames).values()) == 1
    assert max(len(frame.deltas) for frame in frames) == 16
    assert len(frames) < 40


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
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=5.0)
    request = gateway.request("x " * 300, sampling=ENDLESS)
    answer = await gateway.publish(request)
    await answer.wait_for_tokens(2)
    await gateway.cancel(request.id)
    cancelled_at = time.monotonic()
    engine = worker.worker._engine
    while engine.stats.running or engine.stats.free_blocks != engine.stats.total_blocks:
        assert time.monotonic() - cancelled_at < 0.25
        await asyncio.sleep(0.001)
    await gateway.ask()
    assert answer.finish is None
    await gateway.wait_until_acknowledged()


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


async def test_request_cancelled_before_it_is_pulled_is_acknowledged_unread(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    request = gateway.request()
    await gateway.cancel(request.id)
    await gateway.nats.flush()
    answer = await gateway.publish(request)
    await gateway.ask()
    assert answer.deltas == []
    await gateway.wait_until_acknowledged()


async def test_cancellation_of_an_old_epoch_leaves_the_new_one(worker: RunningWorker, gateway: TestGateway) -> None:
    request_id = fresh_name("r")
    answer = await gateway.publish(gateway.request(id=request_id, epoch=2, sampling=Sampling(max_tokens=50)))
    await answer.claimed.wait()
    await gateway.cancel(request_id, epoch=1)
    assert (await answer.wait()).finish.reason == "length"


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
    assert old.finish is None


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


async def test_expired_request_is_told_so_without_running(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.ask(deadline=time.time() - 1)
    assert [delta.finish.reason for delta in answer.deltas if delta.finish] == ["expired"]
    assert len(answer.deltas) == 1


async def test_deadline_ends_a_running_request(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.ask(deadline=time.time() + 0.2, sampling=ENDLESS)
    assert answer.finish.reason == "expired"
    assert len(answer.token_ids) > 3


@pytest.mark.parametrize("num_emitted", [0, 1, 7, 19])
async def test_resumed_request_continues_with_exactly_the_missing_text(
    worker: RunningWorker, gateway: TestGateway, num_emitted: int
) -> None:
    sampling = Sampling(max_tokens=20, ignore_eos=True, seed=7)
    whole = await gateway.ask(sampling=sampling)
    emitted = tuple(whole.token_ids[:num_emitted])
    resumed = await gateway.ask(sampling=sampling, emitted=emitted, epoch=1)
    assert resumed.deltas[0].seq == num_emitted
    assert resumed.token_ids == whole.token_ids[num_emitted:]
    assert TOKENIZER.decode(emitted) + resumed.text == whole.text
    assert resumed.finish.usage.completion_tokens == 20


async def test_resumed_request_that_was_complete_only_ends(worker: RunningWorker, gateway: TestGateway) -> None:
    emitted = tuple(TOKENIZER.encode_text("a b c d"))
    sampling = Sampling(max_tokens=len(emitted), ignore_eos=True)
    answer = await gateway.ask(sampling=sampling, emitted=emitted)
    assert (answer.finish.reason, answer.token_ids, answer.text) == ("length", [], "")


async def test_stop_string_cuts_the_text_and_frees_the_sequence(worker: RunningWorker, gateway: TestGateway) -> None:
    free = await gateway.ask(sampling=Sampling(max_tokens=30, ignore_eos=True, seed=3))
    stop = free.text[10:16]
    sampling = Sampling(max_tokens=1500, ignore_eos=True, seed=3, stop=(stop,))
    answer = await gateway.ask(sampling=sampling)
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finish.reason == "stop"
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert answer.finish.usage.completion_tokens == len(answer.token_ids)
    assert stop in TOKENIZER.decode(answer.token_ids)
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 0)


async def test_stop_token_counts_but_has_no_text(worker: RunningWorker, gateway: TestGateway) -> None:
    free = await gateway.ask(sampling=Sampling(max_tokens=10, ignore_eos=True, seed=4))
    last = free.token_ids[4]
    sampling = Sampling(max_tokens=10, ignore_eos=True, seed=4, stop_token_ids=(last,))
    answer = await gateway.ask(sampling=sampling)
    assert answer.finish.reason == "stop"
    assert answer.token_ids == free.token_ids[:5]
    assert answer.text == TOKENIZER.decode(free.token_ids[:4])


async def test_echo_and_prompt_logprobs_come_with_the_first_token(worker: RunningWorker, gateway: TestGateway) -> None:
    text = "def naïve(x):"
    sampling = Sampling(max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    answer = await gateway.ask(text, sampling=sampling, echo=True)
    prompt_ids = TOKENIZER.encode_text(text)
    assert answer.deltas[0].text == ""
    first = answer.deltas[1]
    assert first.text == text + TOKENIZER.decode(first.token_ids)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    rest = [entry for entry in first.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in rest] == prompt_ids[1:]
    assert text.encode().endswith(b"".join(entry.bytes for entry in rest))
    for delta in answer.deltas[1:]:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
        assert len(delta.logprobs[0].top) == 2
    assert answer.deltas[2].prompt_logprobs is None


async def test_echo_without_new_tokens_comes_with_the_end(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.ask("a b", sampling=Sampling(max_tokens=0, prompt_logprobs=0), echo=True)
    assert (answer.text, answer.token_ids, answer.finish.reason) == ("a b", [], "length")
    assert answer.deltas[-1].prompt_logprobs is not None
    assert len(answer.deltas[-1].prompt_logprobs) == len(TOKENIZER.encode_text("a b"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "x " * 3000}, "prompt"),
        ({"text": None, "messages": (ChatMessage(role="user", content="x " * 3000),)}, "messages"),
        ({"text": None, "token_ids": (5, 4096)}, "prompt"),
        ({"text": None, "token_ids": (2**62,)}, "prompt"),
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
    assert (await gateway.ask()).finish.reason == "length"
    await gateway.wait_until_acknowledged()


async def test_chat_request_is_answered(worker: RunningWorker, gateway: TestGateway) -> None:
    messages = (ChatMessage(role="user", content="hello"),)
    answer = await gateway.ask(None, messages=messages)
    assert answer.deltas[0].prompt_tokens == len(TOKENIZER.encode_chat(messages))
    assert answer.finish.reason == "length"


async def test_draining_worker_finishes_running_requests_and_hands_over_waiting_ones(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    answers = [await gateway.publish(gateway.request(sampling=sampling)) for _ in range(6)]
    worker = await make_worker(max_num_seqs=2, simulate=10.0)
    held = worker.worker.consumer._held
    await wait_until(lambda: len(held) == 3)
    await answers[1].wait_for_tokens(1)
    await worker.drain()
    ended = [await answer.wait() for answer in answers[:3]]
    assert [answer.finish.reason for answer in ended] == ["length", "length", "handoff"]
    assert ended[2].token_ids == []
    assert not any(answer.deltas for answer in answers[3:])
    assert (await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.draining)).max_num_seqs == 2
    await make_worker(simulate=0.0)
    for answer in answers[3:]:
        assert (await answer.wait()).finish.reason == "length"


async def test_drain_timeout_hands_over_what_still_runs_for_another_worker_to_continue(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=2.0)
    sampling = Sampling(max_tokens=400, ignore_eos=True, seed=11)
    request = gateway.request(sampling=sampling)
    answer = await gateway.publish(request)
    await answer.wait_for_tokens(5)
    await worker.drain(0.02)
    await answer.wait()
    assert answer.finish.reason == "handoff"
    assert answer.deltas[-1].seq == len(answer.token_ids)
    second = await make_worker(simulate=0.0)
    rest = await gateway.ask(id=request.id, sampling=sampling, epoch=1, emitted=tuple(answer.token_ids))
    assert set(rest.workers) == {second.name}
    whole = await gateway.ask(sampling=sampling)
    assert answer.text + rest.text == whole.text


async def test_request_of_a_worker_that_vanished_is_delivered_to_another(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    limits = StreamLimits(ack_wait_s=1.0)
    first = await make_worker(limits=limits)
    answer = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=1500, ignore_eos=True)))
    await answer.wait_for_tokens(3)
    await first.close()
    second = await make_worker(limits=limits, simulate=0.0)
    await answer.wait()
    assert answer.workers[-1] == second.name
    assert answer.finish.usage.completion_tokens == 1500


async def test_held_request_is_not_delivered_again_while_it_runs(make_worker: MakeWorker, gateway: TestGateway) -> None:
    limits = StreamLimits(ack_wait_s=0.3)
    await make_worker(limits=limits, simulate=2.0)
    await make_worker(limits=limits, simulate=2.0)
    answer = await gateway.ask(sampling=Sampling(max_tokens=400, ignore_eos=True))
    assert len(set(answer.workers)) == 1
    assert [delta.seq for delta in answer.deltas] == [0, *range(400)]


async def test_full_worker_leaves_requests_for_others(make_worker: MakeWorker, gateway: TestGateway) -> None:
    first = await make_worker(max_num_seqs=1)
    blocking = await gateway.publish(gateway.request(sampling=ENDLESS))
    await blocking.wait_for_tokens(1)
    second = await make_worker(max_num_seqs=8)
    answers = [await gateway.ask() for _ in range(5)]
    assert {answer.workers[-1] for answer in answers} <= {first.name, second.name}
    assert sum(answer.workers[-1] == second.name for answer in answers) >= 4
