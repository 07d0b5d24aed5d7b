"""What happens to requests whose prompt is still being encoded: cancelled, drained, replaced."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gpu_worker.consumer import intake
from gpu_worker.consumer.request_reader import RequestReader
from gpu_worker.engine.engine_thread import EngineStoppedError
from gpu_worker.text.output_text import OutputText
from shared.batch_streams import batch_stream
from shared.messages import Delta, Request
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import TOKENIZER, MakeWorker, RunningWorker, TestGateway, wait_until


class SlowEncoder:
    """Holds encodings back until the test lets them go on."""

    def __init__(self, worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_started = 0
        self.may_go_on = asyncio.Event()
        self._encode = worker.worker._encoder.encode
        monkeypatch.setattr(worker.worker._encoder, "is_short", lambda prompt: False)
        monkeypatch.setattr(worker.worker._encoder, "encode", self.encode)

    async def encode(self, *arguments: Any, **options: Any) -> list[int]:
        token_ids: list[int] = await self._encode(*arguments, **options)
        self.num_started += 1
        await self.may_go_on.wait()
        return token_ids


def is_of_engine(delta: Delta) -> bool:
    """Whether a delta says more than who holds the request."""
    return delta != Delta(delta.id, delta.epoch, delta.seq)


async def test_request_cancelled_while_it_is_encoded_never_runs(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SlowEncoder(worker, monkeypatch)
    added: list[object] = []
    engine = worker.worker._engine
    monkeypatch.setattr(engine, "add", added.append)
    request = gateway.request()
    answer = await gateway.publish(request)
    await wait_until(lambda: encoder.num_started == 1)
    # Gateways that look for a worker see that it waits.
    source, queues = worker.worker.consumer._source, worker.worker.consumer._interactive_queues
    assert source.heartbeat(queues).waiting == 1
    await gateway.cancel(request.id)
    await gateway.wait_until_acknowledged()
    assert source.heartbeat(queues).waiting == 0
    encoder.may_go_on.set()
    await worker.worker.consumer._interactive._intake._tasks.wait()
    assert added == []
    assert not any(map(is_of_engine, answer.deltas))


async def test_suspect_is_announced_before_it_is_encoded_and_not_computed_when_it_is_cancelled_meanwhile(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SlowEncoder(worker, monkeypatch)
    request = gateway.request(probation=1)
    answer = await gateway.publish(request)
    await wait_until(lambda: encoder.num_started == 1)
    # Should the tokenizer or a grammar end the process, its gateway knows what has begun there.
    async with asyncio.timeout(20):
        await answer.claimed.wait()
    await gateway.cancel(request.id)
    await gateway.wait_until_acknowledged()
    encoder.may_go_on.set()
    await worker.worker.consumer._interactive._intake._tasks.wait()
    await gateway.ask()
    assert not any(map(is_of_engine, answer.deltas))


@pytest.mark.parametrize("emitted", [(), (5, 6)])
async def test_request_whose_preparation_takes_a_while_is_announced_meanwhile(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, emitted: tuple[int, ...]
) -> None:
    encoder = SlowEncoder(worker, monkeypatch)
    request = gateway.request(emitted=emitted, epoch=len(emitted))
    answer = await gateway.publish(request)
    async with asyncio.timeout(20):
        await answer.claimed.wait()
    assert answer.deltas == [Delta(request.id, request.epoch, len(emitted))]
    encoder.may_go_on.set()
    assert (await answer.wait()).finish.reason == "length"


async def test_request_that_reaches_an_engine_that_has_stopped_goes_to_another_worker(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(sequence: object) -> None:
        raise EngineStoppedError

    monkeypatch.setattr(worker.worker._engine, "add", stopped)
    answer = await gateway.ask()
    assert [delta.finish is not None and delta.finish.reason for delta in answer.deltas] == ["handoff"]


async def test_moved_request_is_expected_to_need_as_many_blocks_as_when_it_was_new(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=1000.0)
    held = worker.worker.consumer._held
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    requests = [gateway.request(sampling=sampling, emitted=emitted) for emitted in ((), tuple(range(5, 30)))]
    for request in requests:
        await (await gateway.publish(request)).claimed.wait()
    new, moved = (held.get(request.id) for request in requests)
    assert new is not None
    assert moved is not None
    assert new.num_blocks == moved.num_blocks > 0
    await gateway.cancel(*(request.id for request in requests))


async def test_text_of_many_emitted_tokens_is_made_in_a_thread_and_goes_on_as_of_few(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    output = RequestReader.output

    def note(reader: RequestReader, request: Request, prompt_ids: list[int]) -> OutputText:
        threads.append(threading.current_thread().name)
        return output(reader, request, prompt_ids)

    monkeypatch.setattr(RequestReader, "output", note)
    emitted = tuple(TOKENIZER.encode_text("x = é")[:-1])
    sampling = Sampling(max_tokens=len(emitted) + 6, ignore_eos=True, stop=("= q", "zzz"))
    few = await gateway.ask(emitted=emitted, sampling=sampling)
    monkeypatch.setattr(intake, "INLINE_TOKENS", len(emitted) - 1)
    many = await gateway.ask(emitted=emitted, sampling=sampling)
    assert (many.text, many.token_ids) == (few.text, few.token_ids)
    assert [name.startswith("prompts") for name in threads] == [False, True]


async def test_newer_epoch_that_comes_while_the_older_is_encoded_runs_alone(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SlowEncoder(worker, monkeypatch)
    request = gateway.request()
    old = await gateway.publish(request)
    await wait_until(lambda: encoder.num_started == 1)
    new = await gateway.publish(gateway.request(id=request.id, epoch=1))
    await wait_until(lambda: encoder.num_started == 2)
    encoder.may_go_on.set()
    assert (await new.wait()).finish.reason == "length"
    assert not any(map(is_of_engine, old.deltas))


async def test_drain_gives_back_a_batch_job_that_is_being_encoded(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await make_worker()
    encoder = SlowEncoder(first, monkeypatch)
    job = gateway.request(lane="batch", tenant="t", reply=None)
    await gateway.publish_job(job)
    await wait_until(lambda: encoder.num_started == 1)
    await first.drain(timeout_s=0.02)
    encoder.may_go_on.set()
    await make_worker()
    await gateway.wait_until_acknowledged(batch_stream("t"))


async def test_drain_hands_over_a_request_that_is_being_encoded(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SlowEncoder(worker, monkeypatch)
    answer = await gateway.publish(gateway.request())
    await wait_until(lambda: encoder.num_started == 1)
    await asyncio.wait_for(worker.drain(timeout_s=60.0), 30.0)
    encoder.may_go_on.set()
    await answer.wait()
    assert [delta.finish is not None and delta.finish.reason for delta in answer.deltas] == ["handoff"]
    await gateway.wait_until_acknowledged()


async def test_prediction_is_encoded_as_what_follows_a_prompt_and_begins_none(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await make_worker()
    encoder = worker.worker.consumer._interactive._intake._encoder
    encode = encoder.encode
    asked: list[tuple[object, bool]] = []

    async def watched(prompt: Any, **options: Any) -> Any:
        asked.append((prompt, options["add_special_tokens"]))
        return await encode(prompt, **options)

    monkeypatch.setattr(encoder, "encode", watched)
    await gateway.ask("x = ", prediction="1 + 1")
    assert asked == [("x = ", True), ("1 + 1", False)]
