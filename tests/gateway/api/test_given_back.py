"""What a request gives back however it ends, who may not ask, and that no stream begins while it may be refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admission.auth import Principal
from gateway.aliases.book import AliasBook
from gateway.api import generation_service
from gateway.api.answer import Outcome, ResponseHead
from gateway.api.generation_service import GenerationService
from gateway.api.usage import UsageTotals
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from gateway.metrics import GatewayMetrics
from shared.sampling import Sampling
from tests.gateway.wire_worker import until

REFUSAL = ApiError(503, "full", code="overloaded", retry_after_s=1.0)


class Answered:
    """An answer that ends when the test says so."""

    sinks = ()
    has_begun = True
    first_token_at: float | None = None
    num_tokens = 7

    def __init__(self) -> None:
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.error: ApiError | None = None
        self.usage = UsageTotals(1)
        self.num_ticks = 0
        self.tick_error: Exception | None = None

    def tick(self, now: float) -> None:
        self.num_ticks += 1
        if self.tick_error is not None:
            raise self.tick_error

    def fail(self, error: ApiError) -> None:
        self.error = error

    def make_ready(self) -> None:
        pass

    def close(self) -> None:
        pass


class Requests:
    """A service whose parts are made up, and what requests take of them and give back."""

    def __init__(self) -> None:
        self.released: list[int | None] = []
        self.num_left = 0
        self.answers: list[Answered] = []
        self.failures: dict[str, Exception] = {}
        self.is_logged = False
        self.name = "e"
        self.load: object = SimpleNamespace(fingerprint=None)
        principal = Principal("k", "t", frozenset({"m"}))
        services = SimpleNamespace(
            config=GatewayConfig(),
            bodies=None,
            keys=SimpleNamespace(authenticate=lambda headers, notes: principal),
            limiter=SimpleNamespace(admit=self._admit),
            metrics=GatewayMetrics(),
            body_rules=lambda principal, model: None,
            aliases=AliasBook(),
        )
        self.watch = SimpleNamespace(owes_answer=False, is_connected=True)
        self.is_admitted = asyncio.Event()
        self.is_admitted.set()
        fleet = SimpleNamespace(reported_load=lambda model: self.load, find_adapter=lambda model, tenant: None)
        dispatcher = SimpleNamespace(nats_watch=self.watch, fleet=fleet)
        record = SimpleNamespace(
            traceparent=None, tenant="t", key="k", parsed=lambda *of: None, failed=lambda error: None
        )
        observer = SimpleNamespace(begin=lambda *of: record, parsed=lambda record: None)
        parts: list[Any] = [services, dispatcher, None, None, observer, None]
        self.service = GenerationService(*parts)
        self.service._reading = cast("Any", SimpleNamespace(read=self._read))

    async def _admit(self, *asked: object) -> object:
        return SimpleNamespace(headers={}, release=self.released.append)

    async def _read(self, generation: Generation, load: object) -> Generation:
        if (failure := self.failures.get("reading")) is not None:
            raise failure
        return generation

    async def generation(self, body: bytes, principal: object, rules: object) -> Generation:
        prompts = (Prompt(1, text="x"),)
        return Generation("completion", body.decode(), prompts, 1, Sampling(), deterministic=True, stream=True)

    async def fitted(self, generation: Generation, *of: object) -> Generation:
        return generation

    def streamed_answer(self, asked: object, parts: object) -> Answered:
        if (failure := self.failures.get("answer")) is not None:
            raise failure
        self.answers.append(Answered())
        return self.answers[-1]

    async def start(self, *arguments: object) -> object:
        if (failure := self.failures.get("start")) is not None:
            raise failure
        await self.is_admitted.wait()
        counts = {"tokens_used": lambda: 3, "delivered": lambda: (0, 0)}
        return SimpleNamespace(
            leave=self._leave,
            is_repeated=False,
            prediction=None,
            is_counted_elsewhere=False,
            is_counted=False,
            **counts,
        )

    def _leave(self) -> None:
        self.num_left += 1

    async def ask(self, model: str = "m") -> int:
        async def body(*bounds: object) -> bytes:
            return model.encode()

        exchange = SimpleNamespace(head=SimpleNamespace(headers=[], notes={}), read_body=body)
        head = ResponseHead("", 0.0)
        await self.service.serve(*cast("Any", (self, exchange, head)))
        return head.status

    @property
    def num_places(self) -> int:
        return self.service._places._shares.used


@pytest.fixture
async def requests() -> Requests:
    return Requests()


async def test_request_that_is_refused_costs_nothing(requests: Requests) -> None:
    requests.failures["start"] = REFUSAL
    assert await requests.ask() == 503
    assert requests.answers[0].error is REFUSAL
    assert (requests.released, requests.num_places) == ([0], 0)


@pytest.mark.parametrize(
    ("part", "failure", "released"),
    [
        ("reading", REFUSAL, 0),
        ("reading", RuntimeError("broken"), 0),
        ("reading", asyncio.CancelledError(), 0),
        ("answer", RuntimeError("broken"), 0),
        ("start", RuntimeError("broken"), None),
    ],
)
async def test_request_that_cannot_be_read_or_answered_gives_back_what_it_took(
    requests: Requests, part: str, failure: Exception, released: int | None
) -> None:
    requests.failures[part] = failure
    with pytest.raises(type(failure)):
        await requests.ask()
    assert (requests.released, requests.num_places) == ([released], 0)


async def test_model_without_workers_is_unknown_and_costs_nothing(requests: Requests) -> None:
    requests.load = None
    with pytest.raises(ApiError) as caught:
        await requests.ask()
    assert (caught.value.code, requests.released, requests.num_places) == ("model_not_found", [0], 0)


async def test_model_that_the_key_may_not_use_is_unknown_and_nothing_is_counted(requests: Requests) -> None:
    with pytest.raises(ApiError) as caught:
        await requests.ask("secret")
    assert (caught.value.status, requests.released, requests.answers, requests.num_places) == (404, [], [], 0)


async def test_answer_that_has_ended_is_not_looked_after_any_more(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    ticking = asyncio.create_task(requests.service.tick_forever())
    asking = [asyncio.create_task(requests.ask()) for _ in range(2)]
    await until(lambda: len(requests.answers) == 2 and all(answer.num_ticks for answer in requests.answers))
    ended, going_on = requests.answers
    # A stream that cannot be looked after keeps no other from it.
    ended.tick_error = going_on.tick_error = RuntimeError("broken")
    before = [answer.num_ticks for answer in requests.answers]
    await until(lambda: all(answer.num_ticks > num for answer, num in zip(requests.answers, before, strict=True)))
    ended.done.set_result(Outcome.COMPLETED)
    assert await asking[0] == 200
    assert (requests.released, requests.num_left, requests.num_places) == ([7], 1, 1)
    num_ticks, before = ended.num_ticks, [going_on.num_ticks]
    await until(lambda: going_on.num_ticks > before[0] + 2)
    assert ended.num_ticks == num_ticks
    asking[1].cancel()
    await asyncio.gather(asking[1], return_exceptions=True)
    assert (requests.released, requests.num_left, requests.num_places) == ([7, None], 2, 0)
    ticking.cancel()


@pytest.mark.parametrize(("status", "num_tokens"), [(408, 3), (500, 0)])
async def test_answer_that_failed_costs_nothing_unless_its_time_was_over(
    requests: Requests, status: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[object] = []
    monkeypatch.setattr(generation_service, "count_answer", lambda *of, **how: counted.append(of))
    asking = asyncio.create_task(requests.ask())
    await until(lambda: requests.answers)
    requests.answers[0].error = ApiError(status, "no")
    requests.answers[0].done.set_result(Outcome.FAILED)
    assert await asking == status
    assert (requests.released, requests.num_left) == ([num_tokens], 1)
    # Nothing came, so that the name of its model may have been made up.
    assert counted == []


async def test_stream_is_not_begun_before_it_is_admitted(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    requests.is_admitted.clear()
    tasks = [asyncio.create_task(requests.ask()), asyncio.create_task(requests.service.tick_forever())]
    await until(lambda: requests.answers)
    for _ in range(20):
        await asyncio.sleep(0)
    (answer,) = requests.answers
    assert answer.num_ticks == 0
    requests.is_admitted.set()
    await until(lambda: answer.num_ticks > 0)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(("owes_answer", "is_connected"), [(True, True), (False, False)])
async def test_stream_is_not_begun_while_nats_owes_an_answer_or_is_away(
    requests: Requests, owes_answer: bool, is_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_service, "TICK_S", 0.0)
    requests.watch.owes_answer, requests.watch.is_connected = owes_answer, is_connected
    new, begun = Answered(), Answered()
    new.has_begun = False
    requests.service._streamed |= cast("Any", {new, begun})
    ticking = asyncio.create_task(requests.service.tick_forever())
    await until(lambda: begun.num_ticks > 5)
    assert new.num_ticks == 0
    requests.watch.owes_answer, requests.watch.is_connected = False, True
    await until(lambda: new.num_ticks > 0)
    ticking.cancel()
