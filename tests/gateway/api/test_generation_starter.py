"""What prompts of any length cost others: lengths that no worker takes, and estimates above a context's length."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import cast

import msgspec
import pytest

from gateway.admission.caller import Caller
from gateway.admission.shedding import Shedder
from gateway.aliases.book import ArmProbe
from gateway.aliases.comparison import ArmCounts
from gateway.api.generation_starter import GenerationStarter, Membership
from gateway.api.model_fit import ModelReading
from gateway.api.output_reading import StructuredOutputAdmission
from gateway.cache.prompt_cache import CacheKey, PromptCache
from gateway.config import GatewayConfig
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import FleetLoad, OwnRequests
from gateway.fleet.liveness import FleetLimits
from gateway.generation import Generation, Prompt, ToolUse
from gateway.metrics import GatewayMetrics
from shared.cache_hints import CacheHints
from shared.conversation import ChatMessage, ChatOptions
from shared.features import FEATURES
from shared.formats import Tool, ToolChoice
from shared.grammar.checker import GrammarChecker
from shared.messages import Delta, Finish, Request, TokenLogprob
from shared.pooling import Pooling
from shared.sampling import Sampling, SamplingDefaults
from shared.server_clock import ServerClock
from tests.gateway.api.test_app import heartbeat
from tests.gateway.dispatch_bench import ListSink
from tests.gateway.parsed_bodies import generation

MODEL_LEN = 2048
# What 92,000 characters are estimated as; a tokenizer may make a few tokens of them.
INFLATED = 26_286
CONFIG = GatewayConfig(interactive_ttft_slo_s=10.0)
BEAT = heartbeat(
    "m",
    worker="w1",
    free_blocks=10_000,
    total_blocks=10_000,
    max_model_len=MODEL_LEN,
    max_num_seqs=64,
    prefill_rate=1000.0,
    decode_rate=1000.0,
    max_prompt_characters=92_160,
    started=1.0,
)


class Flights(FlightTable):
    """All requests are of one tenant."""

    def share(self, load: FleetLoad, tenant: str) -> None:
        return None

    def num_of(self, model: str, tenant: str) -> int:
        return len(self)


class Queue:
    """Takes what is submitted, as a dispatcher does, and keeps it unclaimed."""

    reply = "reply"

    def __init__(self) -> None:
        self.clock = ServerClock()
        self.flights = Flights()
        self.fleet = Fleet("gw", FleetLimits(), OwnRequests(self.flights.unshown, lambda: {BEAT.model: (50, 10**6)}))

    def submit(self, request: Request, sink: Sink, estimated_tokens: int, expires_at: float) -> Flight:
        flight = Flight(request, sink, estimated_tokens, published_at=0.0, expires_at=expires_at)
        self.flights.add(flight)
        return flight

    def cancel(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            self.flights.remove(flight)


class Gateway:
    """A generator, its queue, and a fleet with made-up numbers."""

    def __init__(self, cache: PromptCache | None = None) -> None:
        self.queue = Queue()
        self.hear()
        self.metrics = GatewayMetrics()
        cache = cache or PromptCache(None, 60, 10_000, 0)
        shedder = Shedder(CONFIG, self.metrics, uniform=lambda: 0.5)
        grammars = StructuredOutputAdmission(GrammarChecker())
        self.starter = GenerationStarter(cast("Dispatcher", self.queue), shedder, cache, grammars, self.metrics, 60.0)

    @property
    def load(self) -> FleetLoad:
        load = self.queue.fleet.reported_load("m")
        assert load is not None
        return load

    def hear(self, **changes: object) -> None:
        self.queue.fleet.note_heartbeat(msgspec.structs.replace(BEAT, **changes), 0.0)

    async def ask(self, sinks: Sequence[ListSink], *, is_fresh: bool = False) -> Membership:
        """Ask for something of which all get the same answer, with a choice for each sink."""
        asked = generation("completion", Prompt(5, text="x"), len(sinks), deterministic=True)
        return await self.starter.start(asked, self.load, Caller("t", "t", [], b"x"), sinks, is_fresh)

    async def start(self, tenant: str, *prompts: Prompt) -> Membership:
        asked = msgspec.structs.replace(generation("completion"), prompts=prompts)
        caller = Caller(tenant, tenant, [], repr(prompts).encode())
        return await self.starter.start(asked, self.load, caller, [cast("Sink", None)] * len(prompts), False)

    async def read(self, asked: Generation) -> Generation:
        return await ModelReading().read(asked, self.load)

    async def check(self, asked: Generation) -> None:
        await self.starter.checked(asked, self.load, "someone")


async def refusal(asking: Awaitable[object], status: int, code: str | None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await asking
    assert (caught.value.status, caught.value.code) == (status, code)
    return caught.value


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway()


def inflated() -> Prompt:
    return Prompt(estimated_tokens=INFLATED, text="a" * 92_000)


async def ttft_s(gateway: Gateway) -> float:
    """Return what a short request of another tenant is told now, and take it back."""
    membership = await gateway.start("victim", Prompt(estimated_tokens=10, text="def"))
    membership.leave()
    assert membership.prediction is not None
    assert membership.prediction.ttft_s is not None
    return membership.prediction.ttft_s


async def test_prompts_of_inflated_estimates_delay_another_tenant_by_a_context_each(gateway: Gateway) -> None:
    alone = await ttft_s(gateway)
    for number in range(1, 5):
        await gateway.start("mallory", inflated())
        assert await ttft_s(gateway) == pytest.approx(alone + number * MODEL_LEN / BEAT.prefill_rate)
    assert not gateway.metrics.shed.total()


async def test_clients_that_repeat_inflated_prompts_never_shed_another_tenant(gateway: Gateway) -> None:
    running: list[Membership] = []
    for _ in range(100):
        # Four clients: each sends its next request when a worker has refused the one before.
        if len(running) == 4:
            running.pop(0).leave()
        running.append(await gateway.start("mallory", inflated()))
        assert await ttft_s(gateway) <= 4 * MODEL_LEN / BEAT.prefill_rate + 0.1
    assert not gateway.metrics.promises["made"]


async def test_refusal_of_an_inflated_prompt_books_the_time_of_one_context(gateway: Gateway) -> None:
    gateway.hear(waiting=5, waiting_tokens=9_500)
    # 9.5 s of queue and 2.048 s of its own are 1.548 s too many; 5 % of each second are not promised.
    assert (await refusal(gateway.start("mallory", inflated()), 503, "overloaded")).retry_after_s == 4


@pytest.mark.parametrize("prompt", [Prompt(1, text="a" * 92_161), Prompt(MODEL_LEN, token_ids=(1,) * MODEL_LEN)])
async def test_prompt_that_certainly_fits_no_worker_is_a_400_however_long_the_queue(
    gateway: Gateway, prompt: Prompt
) -> None:
    gateway.hear(waiting=50, waiting_tokens=10**6)
    error = await refusal(gateway.start("mallory", prompt), 400, "context_length_exceeded")
    assert f"This model's maximum context length is {MODEL_LEN} tokens" in error.message


async def test_token_ids_that_fit_one_of_the_workers_are_queued(gateway: Gateway) -> None:
    gateway.hear(worker="w2", max_model_len=2 * MODEL_LEN)
    await gateway.start("tenant", Prompt(MODEL_LEN, token_ids=(1,) * MODEL_LEN))
    assert gateway.queue.flights.unshown("m") == (1, MODEL_LEN)


async def test_each_prompt_of_a_request_is_counted_as_a_context_at_most(gateway: Gateway) -> None:
    await gateway.start("tenant", inflated(), inflated(), Prompt(7, text="x"))
    assert gateway.queue.flights.unshown("m") == (3, 2 * MODEL_LEN + 7)


async def test_deadlines_are_those_of_the_moment_of_asking_whatever_the_wall_clock_does_meanwhile(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    moments = itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * next(moments))
    await gateway.start("tenant", Prompt(1, text="x"), Prompt(1, text="y"))
    due = asyncio.get_running_loop().time() + 60
    assert [flight.expires_at for flight in gateway.queue.flights] == [pytest.approx(due, abs=30)] * 2
    deadlines = [flight.request.deadline for flight in gateway.queue.flights]
    assert deadlines == [pytest.approx(now() + 60, abs=30)] * 2


async def test_job_for_a_model_that_does_not_generate_is_a_400(gateway: Gateway) -> None:
    gateway.hear(tasks=("embed",))
    await refusal(gateway.check(generation()), 400, "unsupported_task")


async def test_what_workers_of_an_earlier_version_would_ignore_waits_for_their_update(gateway: Gateway) -> None:
    gateway.hear(tasks=("embed",), features=("resumed",))
    plain = generation("embedding", deterministic=True, pooling=Pooling())
    await gateway.check(plain)
    asked = [{"truncate_prompt_tokens": 5}, {"pooling": Pooling(input_type="query")}, {"pooling": Pooling(raw=True)}]
    generations = [msgspec.structs.replace(plain, **fields) for fields in asked]
    for each in generations:
        assert (await refusal(gateway.check(each), 503, "no_worker")).retry_after_s
    gateway.hear(tasks=("embed",), features=FEATURES)
    for each in generations:
        await gateway.check(each)


async def test_listed_tokens_are_not_reported_before_all_workers_know_them(gateway: Gateway) -> None:
    listed = generation("completion", sampling=Sampling(logprobs=0, logprob_token_ids=(5, 7)))
    gateway.hear(features=tuple(feature for feature in FEATURES if feature != "logprob_token_ids"))
    await gateway.check(generation("completion", sampling=Sampling(logprobs=0)))
    assert (await refusal(gateway.check(listed), 503, "no_worker")).retry_after_s
    gateway.hear(features=FEATURES)
    await gateway.check(listed)


async def test_workers_of_an_earlier_version_are_told_no_parts_of_contents(gateway: Gateway) -> None:
    message = ChatMessage(role="user", content="ab", part_lengths=(1, 1))
    for features, expected in ((("resumed",), ()), (FEATURES, (1, 1))):
        gateway.hear(features=features)
        [told] = (await gateway.read(generation(prompt=Prompt(3, messages=(message,))))).prompts
        assert told.messages is not None
        assert (told.messages[0].content, told.messages[0].part_lengths) == ("ab", expected)


async def test_workers_of_an_earlier_version_are_told_no_hints(gateway: Gateway) -> None:
    """Requests with images are JSON, in which they would refuse an unknown field."""
    hints = CacheHints(drop=True)
    for features, expected in ((("images",), None), (FEATURES, hints)):
        gateway.hear(features=features)
        assert (await gateway.read(generation(cache_hints=hints))).cache_hints == expected


async def test_job_whose_prompt_fits_no_worker_is_a_400(gateway: Gateway) -> None:
    prompt = Prompt(3, token_ids=tuple(range(MODEL_LEN)))
    await refusal(gateway.check(generation(prompt=prompt)), 400, "context_length_exceeded")


def with_a_call(template: str | None = None) -> Generation:
    """Return a conversation of which the answer has to call a tool."""
    prompt = Prompt(3, messages=(), chat=ChatOptions(template=template))
    use = ToolUse((Tool("f"),), ToolChoice("required"))
    return generation(prompt=prompt, tools=use)


async def test_calls_are_read_as_its_workers_write_them_while_all_of_these_are_away(gateway: Gateway) -> None:
    gateway.hear(chat_format="hermes")
    gateway.hear(chat_format="hermes", draining=True)
    read = await gateway.read(with_a_call())
    assert read.reading is not None
    assert read.reading.format_name == "hermes"


async def test_what_is_left_out_is_as_the_models_workers_advise(gateway: Gateway) -> None:
    gateway.hear(sampling_defaults=SamplingDefaults(temperature=0.6))
    assert (await gateway.read(generation(left_out=("temperature",)))).sampling.temperature == 0.6


async def test_calls_wait_for_a_worker_while_none_has_said_how_its_model_writes_them(gateway: Gateway) -> None:
    gateway.queue.fleet = Fleet("gw", FleetLimits(), OwnRequests(gateway.queue.flights.unshown, dict))
    assert (await refusal(gateway.read(with_a_call()), 503, "no_worker")).retry_after_s == 2
    own = "{% for m in messages %}<tool_call>{{ tools }}{% endfor %}"
    assert (await gateway.read(with_a_call(own))).reading is not None
    gateway.queue.fleet.note_heartbeat(msgspec.structs.replace(BEAT, model="another"), 0.0)
    assert gateway.queue.fleet.reported_load("m") is None


async def test_cached_answer_is_delivered_and_nothing_is_queued(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(cache: PromptCache, key: object) -> list[list[Delta]]:
        return [[Delta("", 0, 0, (1,), "a", prompt_tokens=5), Delta("", 0, 1, finish=Finish("stop"))]]

    monkeypatch.setattr(PromptCache, "get", get)
    sink = ListSink()
    membership = await gateway.ask([sink])
    assert (sink.deltas[0].text, sink.endings, len(gateway.queue.flights)) == ("a", 1, 0)
    assert (membership.prediction, membership.tokens_used()) == (None, 6)
    assert (gateway.metrics.cache_hits, gateway.metrics.cache_misses) == (1, 0)
    # An answer with another number of choices is another answer, and who wants a new one gets it.
    await gateway.ask([ListSink(), ListSink()])
    assert len(gateway.queue.flights) == 2
    membership = await gateway.ask([ListSink()], is_fresh=True)
    assert (len(gateway.queue.flights), membership.is_repeated) == (3, False)
    membership.leave()
    assert len(gateway.queue.flights) == 2


async def test_answer_of_a_fleet_whose_revisions_changed_meanwhile_is_not_kept(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[str, ...]] = []

    async def put(cache: PromptCache, key: CacheKey, sequences: object) -> None:
        kept.append(key.revisions)

    async def answer() -> None:
        (flight,) = gateway.queue.flights
        gateway.queue.flights.remove(flight)
        flight.sink.deliver(Delta(flight.id, 0, 0, (1,), "a", prompt_tokens=5))
        flight.sink.deliver(Delta(flight.id, 0, 1, finish=Finish("stop")))
        await asyncio.sleep(0)

    monkeypatch.setattr(PromptCache, "put", put)
    gateway.hear(revision="old")
    await gateway.ask([ListSink()])
    await answer()
    assert kept == [("old",)]
    await gateway.ask([ListSink()])
    gateway.hear(worker="w2", revision="new")
    # Whichever has begun it, the other may have gone on with it.
    await answer()
    assert kept == [("old",)]
    await gateway.ask([ListSink()])
    await answer()
    assert kept == [("old",), ("new", "old")]


async def test_requests_name_their_key_and_its_weight(gateway: Gateway) -> None:
    requests = gateway.starter.requests(generation("completion", n=2), Caller("key_1", "acme", [], b"x", weight=2.5))
    assert [(each.tenant, each.key, each.weight) for each in requests] == [("acme", "key_1", 2.5)] * 2


@pytest.mark.parametrize(
    ("pooling", "logprobs", "has_requests", "is_measured"),
    [
        (None, None, False, True),
        # None are wanted.
        (None, 1, False, False),
        (None, 2, False, True),
        # Another gateway that takes the stream over would show what was asked for to measure alone.
        (None, None, True, False),
        (None, 2, True, True),
        (Pooling(task="embed"), None, False, False),
    ],
)
async def test_canary_measures_answers_whose_client_is_shown_what_it_asked_for(
    gateway: Gateway, pooling: Pooling | None, logprobs: int | None, has_requests: bool, is_measured: bool
) -> None:
    probe = ArmProbe(ArmCounts(), wants_logprobs=logprobs != 1, told=Counter(), labels=("a", "t", "canary"))
    caller, sink = Caller("t", "t", [], b"x", probe=probe), ListSink()
    measured = generation("completion", sampling=Sampling(logprobs=logprobs), pooling=pooling)
    requests = gateway.starter.requests(measured, caller)
    await gateway.starter.dispatch(measured, caller, [sink], requests if has_requests else None)
    (flight,) = gateway.queue.flights
    asked = flight.request.sampling.logprobs
    assert asked == (0 if is_measured and logprobs is None else logprobs)
    flight.sink.deliver(Delta("r", 0, 0, (1,), "x", logprobs=(TokenLogprob(1, "x", b"x", -0.5),)))
    assert probe.num == is_measured
    assert (sink.deltas[0].logprobs is None) == (is_measured and logprobs is None)
