"""Workers that die, and the one request that kills them: its neighbours are served, it is quarantined."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec
import pytest

from gateway.errors import ApiError
from shared.dead_letters import DeadLetter
from shared.messages import Delta, Request
from shared.sampling import Sampling
from shared.streams import DEAD_STREAM, INTERACTIVE_STREAM
from shared.subjects import dead_letter_subject, request_subject
from tests.gateway.dispatch_bench import Bench, ListSink
from tests.gateway.wire_worker import WireWorker, expected_text, until

NUM_NEIGHBOURS = 40
NUM_TOKENS = 40
POISON = "poison"
RESERVED_S = 0.5


@dataclass
class ProbationRule:
    """What a real worker does: it begins a suspect when all else has produced a token, and nothing new beside it."""

    running: dict[str, tuple[Request, int]]
    reserved_until: float = 0.0

    def may_begin(self, request: Request) -> bool:
        produced = [(position - len(other.emitted), other) for other, position in self.running.values()]
        has_suspect = any(num_tokens < other.probation for num_tokens, other in produced)
        if not request.probation:
            return bool(request.emitted) or not (has_suspect or time.monotonic() < self.reserved_until)
        is_free = not has_suspect and all(num_tokens for num_tokens, _ in produced)
        if not has_suspect:
            self.reserved_until = 0.0 if is_free else time.monotonic() + RESERVED_S
        return is_free


class MortalFleet:
    """Workers that die of poison; each is replaced by a new one.

    They die when it has produced its `deadly_token`, and with -1 when they read its prompt: before they claim it,
    unless it is a suspect.
    """

    def __init__(self, bench: Bench, size: int, deadly_token: int) -> None:
        self.bench = bench
        self.size = size
        self.deadly_token = deadly_token
        self.num_deaths = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_one(slot)) for slot in range(self.size)]

    async def stop(self) -> None:
        """Cancel until all have ended: `asyncio.wait_for` of Python 3.11 may lose a cancellation."""
        pending = set(self._tasks)
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)
        assert all(task.cancelled() for task in self._tasks), self._tasks

    async def _keep_one(self, slot: int) -> None:
        for generation in range(100):
            async with WireWorker(
                self.bench.url, self.bench.model, f"w{slot}-{generation}-{self.bench.model}"
            ) as worker:
                await self._serve_until_death(worker)
            self.num_deaths += 1
            await asyncio.sleep(0.2)

    async def _serve_until_death(self, worker: WireWorker) -> None:
        """Serve all; die when poison has produced its last token."""
        running: dict[str, tuple[Request, int]] = {}
        rule = ProbationRule(running)
        while True:
            while not worker.requests.empty():
                request = worker.requests.get_nowait()
                if request.id in running and running[request.id][0].epoch >= request.epoch:
                    continue  # delivered again, because this worker does not say that it is working
                if not rule.may_begin(request):
                    await worker.refuse(request)
                    continue
                if request.text == POISON and self.deadly_token < 0:
                    if request.probation and request.reply is not None:
                        await worker.send(request.reply, [Delta(request.id, request.epoch, len(request.emitted))])
                    return
                await worker.claim(request)
                running[request.id] = (request, len(request.emitted))
            worker.forget_cancelled(running)
            for request, position in running.values():
                if request.text == POISON and position >= self.deadly_token:
                    return
            await worker.step_all(running)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("num_workers", "deadly_token"),
    [
        (1, 0),
        (2, 3),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(1, 3), (2, 0), (3, 0), (3, 3), (1, -1), (2, -1)]),
    ],
)
async def test_poison_among_neighbours_is_quarantined_alone(bench: Bench, num_workers: int, deadly_token: int) -> None:
    fleet = MortalFleet(bench, num_workers, deadly_token)
    neighbours, poisoned = [ListSink() for _ in range(NUM_NEIGHBOURS)], ListSink()
    sampling = Sampling(max_tokens=NUM_TOKENS)
    for sink in neighbours[: NUM_NEIGHBOURS // 2]:
        await bench.submit(sink, sampling=sampling)
    poison = await bench.submit(poisoned, text=POISON, sampling=sampling, tenant="mallory")
    for sink in neighbours[NUM_NEIGHBOURS // 2 :]:
        await bench.submit(sink, sampling=sampling)
    fleet.start()
    try:
        await asyncio.gather(*(sink.end(60) for sink in [*neighbours, poisoned]))
    finally:
        await fleet.stop()
    assert [sink.error for sink in neighbours if sink.error] == []
    assert {sink.text for sink in neighbours} == {expected_text(NUM_TOKENS)}
    assert poisoned.refusal == (500, "request_quarantined")
    assert poison.id in poisoned.error.message
    assert fleet.num_deaths <= 6
    await bench.dispatcher._recovery.close()
    letter = await _letter(bench, "mallory")
    assert (letter.request.id, letter.request.text, letter.reason) == (poison.id, POISON, "worker_lost")
    assert len(letter.attempts) >= 3
    assert await _num_letters(bench) == 1
    # Whatever stays in the queue is delivered again, and kills again.
    async with asyncio.timeout(5):
        while await _num_queued(bench):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_poison_that_is_repeated_costs_one_worker_and_then_none(bench: Bench) -> None:
    fleet = MortalFleet(bench, 2, 0)
    sampling = Sampling(max_tokens=NUM_TOKENS)
    fleet.start()
    costs: list[int] = []
    try:
        for seed in range(2):
            before, sink = fleet.num_deaths, ListSink()
            await bench.submit(sink, text=POISON, sampling=msgspec.structs.replace(sampling, seed=seed))
            await sink.end(60)
            assert sink.error is not None
            assert sink.error.code == "request_quarantined"
            await asyncio.sleep(0.3)
            costs.append(fleet.num_deaths - before)
        with pytest.raises(ApiError) as refused:
            await bench.submit(ListSink(), text=POISON, sampling=sampling)
        assert refused.value.code == "request_quarantined"
        innocent = ListSink()
        await bench.submit(innocent, text=POISON + "!", sampling=sampling)
        await innocent.end(20)
        assert innocent.error is None
    finally:
        await fleet.stop()
    assert costs[1] == 1 < costs[0]


async def test_copies_of_poison_sent_together_cost_no_more_workers_than_one(bench: Bench) -> None:
    fleet = MortalFleet(bench, 2, 0)
    costs: list[int] = []

    async def ask(seed: int) -> str | None:
        sink = ListSink()
        await bench.submit(sink, text=POISON, sampling=Sampling(max_tokens=NUM_TOKENS, seed=seed))
        await sink.end(30)
        return sink.error and sink.error.code

    try:
        for _ in range(2):
            before = fleet.num_deaths
            asked = [asyncio.create_task(ask(seed)) for seed in range(8)]
            await asyncio.sleep(0)
            if before == 0:
                fleet.start()
            assert await asyncio.gather(*asked) == ["request_quarantined"] * 8
            await asyncio.sleep(0.3)
            costs.append(fleet.num_deaths - before)
    finally:
        await fleet.stop()
    assert costs[0] <= 5  # both workers that had claimed copies, two for the verdict, one that may have claimed late
    assert costs[1] == 1


@pytest.mark.slow
async def test_innocent_requests_among_ever_new_poison_are_not_quarantined(bench: Bench) -> None:
    fleet = MortalFleet(bench, 2, 0)
    fleet.start()
    innocent = [ListSink() for _ in range(8)]
    for number, sink in enumerate(innocent):
        await bench.submit(sink, text=f"innocent {number}", sampling=Sampling(max_tokens=NUM_TOKENS))

    async def poison() -> None:
        for number in range(10):
            await bench.submit(
                ListSink(), text=POISON, sampling=Sampling(max_tokens=NUM_TOKENS + number), tenant="mallory"
            )
            await asyncio.sleep(0.1)

    poisoning = asyncio.create_task(poison())
    try:
        await poisoning
        # Some wait longer among poison that never ends (record 0020): none may be blamed for it.
        await asyncio.gather(*(sink.end(12) for sink in innocent), return_exceptions=True)
    finally:
        poisoning.cancel()
        await fleet.stop()
    assert [sink.error for sink in innocent if sink.error] == []
    assert any(sink.ended.is_set() for sink in innocent)


async def test_suspected_repetition_that_is_answered_clears_its_kind(bench: Bench) -> None:
    fleet = MortalFleet(bench, 1, 0)
    fleet.start()
    poisoned = ListSink()
    await bench.submit(poisoned, text=POISON)
    await poisoned.end(60)
    await fleet.stop()
    worker = await bench.worker("immune")
    serving = asyncio.create_task(worker.serve(0.001))
    probations = []
    for _ in range(2):
        sink = ListSink()
        await bench.submit(sink, text=POISON)
        probations.append(bench.flight.probation)
        await sink.end(20)
        assert sink.error is None
    serving.cancel()
    assert probations == [1, 0]


async def _letter(bench: Bench, tenant: str) -> DeadLetter:
    subject = dead_letter_subject(bench.model, "interactive", tenant)
    message = await bench.nats.jetstream().get_last_msg(DEAD_STREAM, subject)
    assert message.data is not None
    return msgspec.msgpack.decode(message.data, type=DeadLetter)


async def _num_queued(bench: Bench) -> int:
    subject = request_subject(bench.model, "interactive", "default")
    info = await bench.nats.jetstream().stream_info(INTERACTIVE_STREAM, subjects_filter=subject)
    return sum((info.state.subjects or {}).values())


async def _num_letters(bench: Bench) -> int:
    subject = dead_letter_subject(bench.model, "interactive", "*").replace("_2a", "*")
    info = await bench.nats.jetstream().stream_info(DEAD_STREAM, subjects_filter=subject)
    return sum((info.state.subjects or {}).values())


async def test_streams_with_progress_survive_any_number_of_deaths(bench: Bench) -> None:
    sinks = [ListSink() for _ in range(8)]
    for sink in sinks:
        await bench.submit(sink, sampling=Sampling(max_tokens=400))
    for generation in range(5):
        worker = await bench.worker(f"w{generation}")
        serving = asyncio.create_task(worker.serve(0.001))
        await until(lambda goal=(generation + 1) * 50: all(sink.num_tokens >= goal for sink in sinks), 20)
        serving.cancel()
        await worker.die()
    last = await bench.worker("last")
    serving = asyncio.create_task(last.serve(0.0))
    await asyncio.gather(*(sink.end(30) for sink in sinks))
    serving.cancel()
    assert [sink.error for sink in sinks if sink.error] == []
    assert {sink.text for sink in sinks} == {expected_text(400)}


async def test_workers_that_die_together_leave_no_request_suspected(bench: Bench) -> None:
    first, second = await bench.worker("a"), await bench.worker("b")
    await second.stop_pulling()
    await bench.submit(ListSink())
    await first.claim(await first.next_request())
    await until(lambda: bench.flight.worker is not None)
    await asyncio.gather(first.die(), second.die())
    await until(lambda: bench.flight.epoch == 1)
    assert bench.flight.probation == 0
