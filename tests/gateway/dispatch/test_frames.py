"""Frames: which deltas count, whatever comes from whom; flights and their sinks are in memory."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.msg import Msg

from gateway.dispatch.frames import EARLY_S, FrameReceiver, believable, most_prompt_tokens
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.errors import ApiError
from gateway.metrics import MoveReason
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.stack.config import DEMO_MODEL
from shared.conversation import ChatMessage, ChatOptions, ToolCall
from shared.disaggregation import KvReady
from shared.kv_budget import EvictedBlocks, KvBudget
from shared.messages import Delta, Finish, FinishReason, Frame, Request, Usage, decode_request, encode, encode_request
from shared.pooling import Pooling
from shared.receipt import Timing
from tests.gateway.dispatch_bench import ListSink


class BrokenSink(ListSink):
    def deliver(self, delta: Delta) -> None:
        raise RuntimeError("this stream is broken")


class Received:
    """A receiver with its table of flights, and what it asks of revoker and dispatcher."""

    def __init__(self) -> None:
        self.cancels: list[tuple[str, int]] = []
        self.kept: list[str | None] = []
        self.losses: list[str] = []
        self.handed_over: list[Flight] = []
        self.ready: list[KvReady | None] = []
        self.completed: list[Flight] = []
        self.failed: list[Flight] = []
        self.errors: list[ApiError] = []
        self.flights = FlightTable()
        serves_another = lambda worker, model: worker == "of-n" and model != "n"  # noqa: E731
        self.gaps: list[tuple[str, float, int]] = []

        def measures(model: str) -> SimpleNamespace:
            observe = lambda seconds, num_streams=1: self.gaps.append((model, seconds, num_streams))  # noqa: E731
            return SimpleNamespace(gap_s=SimpleNamespace(observe=observe))

        models: Any = {model: measures(model) for model in ("m", "n")}
        self.receiver = FrameReceiver(self.flights, self, self, serves_another, models)  # type: ignore[arg-type]

    def accept(self, frame: Frame) -> None:
        self.receiver.accept(frame)

    def held(self, request_id: str, *, epoch: int = 0, sink: ListSink | None = None) -> Flight:
        """Put a flight into the table that `w` holds and that has had two tokens."""
        flight = Flight(Request(id=request_id, model="m", text="x"), sink or ListSink(), 1, 0.0, epoch=epoch)
        flight.emitted = [7, 8]
        self.flights.add(flight)
        self.flights.claim(flight, "w")
        return flight

    def cancel(self, model: str, request_id: str, epoch: int, keep: str | None = None) -> None:
        self.cancels.append((request_id, epoch))
        self.kept.append(keep)

    def cancel_again(self, request_id: str, epoch: int) -> None:
        self.cancels.append((request_id, epoch))

    def lose(self, flight: Flight, reason: MoveReason, why: str) -> None:
        self.losses.append(reason)

    def hand_over(self, flight: Flight, ready: KvReady | None) -> None:
        self.handed_over.append(flight)
        self.ready.append(ready)

    def complete(self, flight: Flight, delta: Delta) -> None:
        self.completed.append(flight)

    def fail(self, flight: Flight, error: ApiError) -> None:
        self.failed.append(flight)
        self.errors.append(error)


@pytest.fixture
async def received() -> Received:
    return Received()


def tokens(flight: Flight) -> int:
    assert isinstance(flight.sink, ListSink)
    return flight.sink.num_tokens


async def test_delta_of_another_epoch_is_dropped_and_the_sender_of_an_older_one_told(received: Received) -> None:
    flight = received.held("a", epoch=1)
    received.accept(Frame("w", 1, [Delta("a", 2, 2, (9,), "not begun")]))
    assert (tokens(flight), received.cancels) == (0, [])
    received.accept(Frame("w", 1, [Delta("a", 0, 2, (9,), "old")]))
    assert (tokens(flight), flight.emitted) == (0, [7, 8])
    assert received.cancels == [("a", 0)]
    received.accept(Frame("w", 2, [Delta("a", 1, 2, (9,), "new")]))
    assert (tokens(flight), flight.emitted) == (1, [7, 8, 9])


async def test_next_attempt_is_told_what_was_evicted(received: Received) -> None:
    """An attempt that began anew, with blocks of this size or another, has told all of its own."""
    flight, found = received.held("a"), []
    flight.request = msgspec.structs.replace(flight.request, kv_budget=KvBudget(512, "persistence"))
    told = [
        EvictedBlocks(16, (1, 2)),
        None,
        EvictedBlocks(16, (3, 4), first=2),
        EvictedBlocks(16, (9, 9)),
        EvictedBlocks(32, (5,)),
    ]
    for seq, evicted in enumerate(told, start=2):
        frame = Frame("w", 1, [Delta("a", 0, seq, (9,), "?", evicted=evicted)])
        received.accept(msgspec.msgpack.decode(encode(frame), type=Frame))
        found.append(flight.attempt().evicted)
    assert found == [told[0], told[0], EvictedBlocks(16, (1, 2, 3, 4)), *told[3:]]
    request = decode_request(encode_request(flight.attempt()))
    assert (request.evicted, request.emitted) == (told[-1], (7, 8, 9, 9, 9, 9, 9))


@pytest.mark.parametrize(
    ("budget", "evicted"),
    [
        (None, EvictedBlocks(16, (1, 2))),
        (KvBudget(512), EvictedBlocks(16, (1, 2))),
        (KvBudget(512, "persistence"), EvictedBlocks(16, (1, 32))),
        (KvBudget(512, "persistence"), EvictedBlocks(16, (3, 4), first=3)),
        (KvBudget(512, "persistence"), EvictedBlocks(16, (1,) * 65_536)),
        (KvBudget(512, "persistence"), EvictedBlocks(1, (1,) * 65_536)),
    ],
)
async def test_evictions_that_cannot_be_true_end_what_the_next_attempt_is_told(
    received: Received, budget: KvBudget | None, evicted: EvictedBlocks
) -> None:
    """The tokens count: it may be an honest worker's mistake. Only an attempt that begins anew is believed again."""
    flight, found = received.held("a"), []
    flight.request = msgspec.structs.replace(flight.request, kv_budget=budget)
    told = [EvictedBlocks(16, (1, 2)), evicted, EvictedBlocks(16, (3,), first=2), EvictedBlocks(16, (7,))]
    for seq, each in enumerate(told, start=2):
        received.accept(Frame("w", 1, [Delta("a", 0, seq, (9,), "?", evicted=each)]))
        found.append(flight.attempt().evicted)
    is_scored = budget is not None and not budget.is_repeatable
    assert found == [told[0] if is_scored else None, None, None, told[3] if is_scored else None]
    assert (tokens(flight), received.losses) == (4, [])


async def test_delta_of_a_worker_that_does_not_hold_the_flight_is_dropped_and_the_worker_stopped(
    received: Received,
) -> None:
    flight = received.held("a")
    for step in range(3):
        received.accept(Frame("other", step, [Delta("a", 0, 2 + step, (9,), "?")]))
    assert tokens(flight) == 0
    assert received.losses == []
    # Told once in a while, not for each token; and not meant for the worker that holds it.
    assert (received.cancels, received.kept) == ([("a", 0)], ["w"])


async def test_claim_of_a_worker_that_serves_another_model_is_dropped(
    received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    flight = Flight(Request(id="a", model="m", text="x"), ListSink(), 1, 0.0)
    received.flights.add(flight)
    received.accept(Frame("of-n", 1, [Delta("a", 0, 0, (9,), "forged")]))
    assert (flight.worker, flight.emitted, tokens(flight)) == (None, [], 0)
    assert "claimed by worker of-n, which serves another" in caplog.text
    assert (received.cancels, received.losses) == ([], [])
    # The first heartbeat of a fresh worker may come behind its first claim.
    received.accept(Frame("fresh", 1, [Delta("a", 0, 0, (7,), "true")]))
    assert (flight.worker, flight.emitted) == ("fresh", [7])


async def test_announcement_claims_a_flight_and_is_told_to_no_one(received: Received) -> None:
    sink = ListSink()
    flight = received.held("r", sink=sink)
    flight.worker, flight.progressed_at = None, 0.0
    received.accept(Frame("w", 1, [Delta("r", 0, 2)]))
    assert flight.worker == "w"
    assert flight.progressed_at > 0.0
    assert sink.deltas == []
    # What is known of its prompt comes behind it.
    received.accept(Frame("w", 2, [Delta("r", 0, 2, prompt_tokens=3)]))
    assert (flight.prompt_tokens, len(sink.deltas)) == (3, 1)


async def test_word_of_a_request_that_waits_is_no_output_but_says_what_it_has(received: Received) -> None:
    sink = ListSink()
    flight = received.held("r", sink=sink)
    flight.progressed_at = since = 1.0
    received.accept(Frame("w", 1, [Delta("r", 0, 2)]))
    assert flight.heard_at > since
    # Its client has still waited since its last token.
    assert (flight.progressed_at, sink.deltas, received.gaps, received.losses) == (since, [], [], [])
    # A frame before it was lost.
    received.accept(Frame("w", 2, [Delta("r", 0, 3)]))
    assert received.losses == ["gap"]


async def test_jump_ahead_is_a_loss_and_a_repetition_is_not(received: Received) -> None:
    flight = received.held("a")
    received.accept(Frame("w", 1, [Delta("a", 0, 0, (7, 8), "again"), Delta("a", 0, 3, (9,), "too far")]))
    assert tokens(flight) == 0
    assert received.losses == ["gap"]


async def test_one_streams_exception_ends_it_and_no_neighbour(received: Received) -> None:
    before = received.held("a")
    broken = received.held("b", sink=BrokenSink())
    after = received.held("c")
    received.accept(Frame("w", 1, [Delta(name, 0, 2, (9,), "x") for name in ("a", "b", "c")]))
    assert (tokens(before), tokens(after)) == (1, 1)
    assert received.failed == [broken]
    assert [(error.status, error.code) for error in received.errors] == [(500, "internal_error")]


async def test_every_delta_that_counts_is_news_of_its_flight(received: Received) -> None:
    flight = received.held("a")
    now = asyncio.get_running_loop().time()
    received.accept(Frame("w", 1, [Delta("a", 0, 2, (9,), "x")]))
    assert flight.progressed_at >= now
    flight.progressed_at = 0.0
    received.accept(Frame("w", 2, [Delta("a", 0, 3, (10,), "y", prompt_tokens=5)]))
    received.accept(Frame("other", 2, [Delta("a", 0, 4, (10,), "y")]))
    assert flight.progressed_at >= now
    flight.progressed_at = 0.0
    received.accept(Frame("other", 3, [Delta("a", 0, 4, (10,), "y")]))
    assert flight.progressed_at == 0.0


async def test_strays_that_are_remembered_are_bounded(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dispatch.frames.MAX_STRAYS", 10)
    for number in range(100):
        received.accept(Frame("w", 1, [Delta(f"gone-{number}", 0, 0, (1,), "x")]))
        assert len(received.receiver._strays) == number % 10 + 1


async def test_senders_of_several_strays_are_each_told_once_in_a_while(received: Received) -> None:
    for name in "ab":
        received.held(name, epoch=1)
    for step in range(3):
        received.accept(Frame("w", step, [Delta(name, 0, step, (9,), "old") for name in "ab"]))
    assert received.cancels == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_end_completes_the_flight_with_its_last_tokens(received: Received, reason: FinishReason) -> None:
    flight = received.held("a")
    received.accept(Frame("w", 1, [Delta("a", 0, 2, (9,), "x", Finish(reason))]))
    assert flight.emitted == [7, 8, 9]
    assert received.completed == [flight]
    assert (received.losses, received.errors) == ([], [])


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (Finish("expired"), (408, "timeout", None)),
        (Finish("failed", error="broken"), (500, "worker_failed", None)),
        (Finish("failed", error="too long", error_param="prompt", error_code="c"), (400, "c", "prompt")),
        (Finish("failed", error="no", error_param="prompt"), (400, "invalid_value", "prompt")),
    ],
)
async def test_end_without_an_answer_fails_the_flight(
    received: Received, finish: Finish, error: tuple[int, str, str | None]
) -> None:
    received.held("a")
    received.accept(Frame("w", 1, [Delta("a", 0, 2, finish=finish)]))
    assert [(each.status, each.code, each.param) for each in received.errors] == [error]
    assert received.losses == []


@pytest.mark.parametrize(("reason", "lost"), [("expired", "early"), ("cancelled", "cancelled")])
async def test_end_that_was_not_asked_for_here_is_a_loss(received: Received, reason: FinishReason, lost: str) -> None:
    flight = received.held("a")
    flight.expires_at = asyncio.get_running_loop().time() + 60
    received.accept(Frame("w", 1, [Delta("a", 0, 2, finish=Finish(reason))]))
    assert received.losses == [lost]
    assert received.errors == []


async def test_worker_whose_clock_is_a_little_ahead_may_end_a_request_at_its_deadline(received: Received) -> None:
    received.held("a").expires_at = asyncio.get_running_loop().time() + EARLY_S / 2
    received.accept(Frame("w", 1, [Delta("a", 0, 2, finish=Finish("expired"))]))
    assert ([error.status for error in received.errors], received.losses) == ([408], [])


async def test_message_is_a_frame_or_dropped(received: Received) -> None:
    flight = received.held("a")
    for payload in (b"", b"\xc1", b"\xc0", encode(Frame("w", 1, [Delta("a", 0, 2, (9,), "x")]))):
        received.receiver.receive(SimpleNamespace(subject="hr.tok.g", data=payload))  # type: ignore[arg-type]
    assert flight.emitted == [7, 8, 9]


async def test_handover_delivers_its_tokens_without_the_end(received: Received) -> None:
    flight = received.held("a")
    ready = KvReady("a", 0, "w", "0" * 32)
    received.accept(Frame("w", 1, [Delta("a", 0, 2, (9,), "x", Finish("handoff", ready=ready))]))
    assert received.ready == [ready]
    assert flight.emitted == [7, 8, 9]
    assert isinstance(flight.sink, ListSink)
    assert [delta.finish for delta in flight.sink.deltas] == [None]
    assert received.handed_over == [flight]


async def test_stray_of_an_unknown_request_is_cancelled_the_second_time_and_no_later_attempt(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dispatch.frames.STRAY_CANCEL_INTERVAL_S", 0.0)
    for _ in range(2):
        received.accept(Frame("w", 1, [Delta("gone", 3, 0, (1,), "x")]))
    assert received.cancels == [("gone", 3)]


async def test_gaps_between_tokens_are_told_once_a_frame_for_streams_that_got_their_last_token_together(
    received: Received,
) -> None:
    now = received.receiver._loop.time()
    for name, since in (("a", 5.0), ("b", 5.0), ("c", 7.0)):
        received.held(name).progressed_at = now - since
    received.accept(Frame("w", 1, [Delta(name, 0, 2, (9,), "x") for name in "abc"]))
    assert [(model, num_streams) for model, _, num_streams in received.gaps] == [("m", 2), ("m", 1)]
    assert [seconds for _, seconds, _ in received.gaps] == pytest.approx([5.0, 7.0], abs=0.5)


async def test_first_token_has_no_gap_and_the_last_one_has(received: Received) -> None:
    flight = received.held("a")
    flight.emitted = []
    received.accept(Frame("w", 1, [Delta("a", 0, 0, (7,), "x")]))
    assert received.gaps == []
    received.accept(Frame("w", 2, [Delta("a", 0, 1, (8,), "y", Finish("stop"))]))
    assert [num_streams for _, _, num_streams in received.gaps] == [1]


async def test_claim_of_a_later_attempt_tells_how_long_the_client_has_waited(received: Received) -> None:
    flight = received.held("a", epoch=1)
    received.flights.release(flight)
    flight.progressed_at = received.receiver._loop.time() - 3.0
    received.accept(Frame("v", 1, [Delta("a", 1, 2)]))
    assert [seconds for _, seconds, _ in received.gaps] == pytest.approx([3.0], abs=0.5)


async def test_tokens_of_an_answer_are_those_that_came_whatever_its_worker_says(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Delta] = []
    monkeypatch.setattr(received, "complete", lambda flight, delta: ends.append(delta))
    for name, claimed in (("a", 3), ("b", 2**40), ("c", 0)):
        received.held(name)
        received.accept(Frame("w", 1, [Delta(name, 0, 2, (9,), "x", Finish("stop", Usage(7, claimed)))]))
    assert [end.finish for end in ends] == [Finish("stop", Usage(7, 3))] * 3


async def test_prompt_of_an_answer_is_no_longer_than_its_bytes_whatever_its_worker_says(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Delta] = []
    monkeypatch.setattr(received, "complete", lambda flight, delta: ends.append(delta))
    sink = ListSink()
    flight = received.held("a", sink=sink)
    most = most_prompt_tokens(flight.request)
    assert most < 100
    # Also where the claim comes again, with a token.
    for claimed in (2**40, 5, 2**39):
        received.accept(Frame("w", 1, [Delta("a", 0, len(flight.emitted), (9,), "x", prompt_tokens=claimed)]))
        assert flight.prompt_tokens == min(claimed, most)
    usage = Usage(2**40, 1, 2**40, 2**40, 2**40)
    received.accept(Frame("w", 1, [Delta("a", 0, len(flight.emitted), (9,), "x", Finish("stop", usage))]))
    (finish,) = [end.finish for end in ends]
    assert finish == Finish("stop", Usage(most, 6, most, 6, 64 * 7))
    assert all(delta.prompt_tokens in (5, most) for delta in sink.deltas)


@pytest.mark.parametrize("number", [-1, 2**41, 2**63])
async def test_frame_with_counts_that_nothing_has_is_dropped(received: Received, number: int) -> None:
    flight = received.held("a")
    for delta in (
        Delta("a", 0, 2, (9,), "x", Finish("stop", Usage(number, 1))),
        Delta("a", 0, 2, (9,), "x", Finish("stop", Usage(1, number))),
        Delta("a", 0, 2, (9,), "x", Finish("stop", Usage(1, 1), timing=Timing(math.nan, 1.0))),
        Delta("a", 0, 2, (9,), "x", prompt_tokens=number),
    ):
        received.receiver.receive(Msg(None, data=encode(Frame("w", 1, [delta]))))  # type: ignore[arg-type]
    assert (flight.emitted, received.completed) == ([7, 8], [])


# Characters of one to four bytes, one that NFKC makes eighteen of, half a pair's neighbours.
TEXT = st.text(st.sampled_from("a \n{<|é€\ufdfa😀\u200b"), max_size=60)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(read_model_directory(DEMO_MODEL))


@settings(max_examples=60)
@given(text=TEXT)
def test_text_has_no_more_tokens_than_the_bound(text: str, tokenizer: ModelTokenizer) -> None:
    assert len(tokenizer.encode_text(text or "a")) <= most_prompt_tokens(Request(id="a", model="m", text=text))


@settings(max_examples=30)
@given(contents=st.lists(TEXT, min_size=1, max_size=5), with_tools=st.booleans())
def test_conversation_has_no_more_tokens_than_the_bound(
    contents: list[str], with_tools: bool, tokenizer: ModelTokenizer
) -> None:
    messages = tuple(ChatMessage(role="user", content=content) for content in contents)
    options = ChatOptions(tools=json.dumps([TOOL]) if with_tools else None)
    request = Request(id="a", model="m", messages=messages, chat=options)
    assert len(tokenizer.encode_chat(messages, options).token_ids) <= most_prompt_tokens(request)


LONG: Any = "a" * 50_000
CALL = ToolCall(id="c", name="f", arguments=LONG)
TURN: dict[str, Any] = {"role": "user", "content": "a"}
TURNS: list[dict[str, Any]] = [{"content": LONG}, {"reasoning": LONG}, {"tool_calls": (CALL,)}]


@pytest.mark.parametrize(
    "fields",
    [
        *({"text": "a"} | more for more in ({"text": LONG}, {"suffix": LONG})),
        *({"text": "a", "pooling": Pooling(task="score", **{name: LONG})} for name in ("query", "instruction")),
        *({"messages": (ChatMessage(**TURN | turn),)} for turn in TURNS),
        *({"messages": (), "chat": ChatOptions(**{name: LONG})} for name in ("tools", "variables", "template")),
    ],
)
def test_every_text_of_a_request_raises_the_bound(fields: dict[str, Any]) -> None:
    assert most_prompt_tokens(Request(id="a", model="m", **fields)) >= len(LONG)


def test_token_ids_are_as_many_as_were_sent() -> None:
    assert most_prompt_tokens(Request(id="a", model="m", token_ids=(1, 2, 3))) == 3
    # Of an empty prompt the worker makes one that begins a text.
    assert most_prompt_tokens(Request(id="a", model="m", token_ids=())) == 1


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 50))
def test_what_can_be_true_stays_and_nothing_is_beyond_it(prompt: int, cached: int, drafts: int, emitted: int) -> None:
    request = Request(id="a", model="m", text="x" * 100)
    most = most_prompt_tokens(request)
    claimed = Usage(prompt, emitted, cached, drafts, drafts)
    delta = Delta("a", 0, emitted, finish=Finish("stop", claimed), prompt_tokens=prompt)
    told = believable(delta, request, 29, emitted)
    assert told.finish is not None
    assert told.finish.usage is not None
    usage = told.finish.usage
    assert told.prompt_tokens == usage.prompt_tokens == min(prompt, most)
    assert usage.cached_tokens <= usage.prompt_tokens
    assert usage.accepted_prediction_tokens <= emitted
    if prompt <= most and cached <= prompt and drafts <= emitted:
        assert told is delta
