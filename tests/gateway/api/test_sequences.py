"""From what a client asked for to the requests of the queue."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.admission.caller import Caller
from gateway.api.sequences import SequenceWindow, wire_requests
from gateway.dispatch.inflight import Flight, key_of, new_key
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.generation import Details, Generation, Prompt
from shared.cache_hints import CacheHints
from shared.conversation import ChatMessage, ChatOptions
from shared.messages import Delta, Finish, Request
from shared.pooling import Pooling
from shared.sampling import Sampling
from tests.gateway.dispatch_bench import ListSink

TEXTS = (Prompt(1, text="a"), Prompt(1, text="b", suffix="c"))


def asked(*prompts: Prompt, n: int = 1, seed: int = 5, **fields: object) -> list[Request]:
    generation = Generation(
        "completion",
        "m",
        prompts or TEXTS,
        n,
        Sampling(seed=seed),
        deterministic=True,
        **fields,  # type: ignore[arg-type]
    )
    return wire_requests(generation, Caller("", "t", [], b"", "req_1", "00-trace"), "hr.tok.g", 30.0)


def test_each_choice_of_each_prompt_is_a_request_of_its_own() -> None:
    requests = asked(n=3)
    assert [request.text for request in requests] == ["a", "a", "a", "b", "b", "b"]
    assert [request.suffix for request in requests] == [None, None, None, "c", "c", "c"]
    assert [request.sampling.seed for request in requests] == [5, 6, 7, 5, 6, 7]
    base = requests[0].id.removesuffix("-0")
    assert [request.id for request in requests] == [f"{base}-{number}" for number in range(6)]
    # No two generations share an id.
    assert asked()[0].id != requests[0].id
    assert len(base) == 16


def test_ids_begin_with_the_key_of_their_request() -> None:
    generation = Generation("completion", "m", TEXTS, 2, Sampling(seed=5), deterministic=True)
    key = new_key()
    caller = Caller("", "t", [], b"", request_key=key)
    requests = [wire_requests(generation, caller, "hr.tok.g", 30.0) for _ in range(2)]
    ids = [request.id for several in requests for request in several]
    assert {key_of(each) for each in ids} == {key}
    assert len(set(ids)) == 8


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]), (-(2**63), [-(2**63), 1 - 2**63, 2 - 2**63]), (-1, [-1, 0, 1])],
)
def test_seeds_stay_within_64_bits(seed: int, seeds: list[int]) -> None:
    assert [request.sampling.seed for request in asked(TEXTS[0], n=3, seed=seed)] == seeds


def test_what_was_asked_for_is_in_every_request() -> None:
    began = time.time()
    requests = asked(
        lane="batch",
        priority=3,
        echo=True,
        prediction="p",
        add_special_tokens=False,
        truncate_prompt_tokens=7,
        cache_salt="s",
        cache_hints=CacheHints(retain_s=60.0),
        details=Details(token_ids=True),
    )
    for request in requests:
        assert began <= request.created <= time.time()
        assert request.deadline == request.created + 30.0
        expected = {
            "model": "m",
            "tenant": "t",
            "lane": "batch",
            "priority": 3,
            "reply": "hr.tok.g",
            "echo": True,
            "trace": "req_1",
            "traceparent": "00-trace",
            "prediction": "p",
            "pooling": None,
            "add_special_tokens": False,
            "truncate_prompt_tokens": 7,
            "cache_salt": "s",
            "cache_hints": CacheHints(retain_s=60.0),
            "return_prompt_token_ids": True,
        }
        assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize("details", [None, Details(), Details(token_ids=False, prompt_logprobs=True)])
def test_ids_of_the_prompt_are_asked_for_only_where_they_are_shown(details: Details | None) -> None:
    assert not asked(details=details)[0].return_prompt_token_ids


def test_prompt_is_a_conversation_a_text_or_ids() -> None:
    messages, options = (ChatMessage(role="user", content="hi"),), ChatOptions(add_generation_prompt=False)
    conversation, ids = asked(Prompt(1, messages=messages, chat=options), Prompt(1, token_ids=(1, 2)))
    assert (conversation.messages, conversation.chat, conversation.text) == (messages, options, None)
    assert (ids.token_ids, ids.messages, ids.chat, ids.text) == ((1, 2), None, None, None)


def test_what_a_text_is_scored_against_goes_with_it() -> None:
    pooling = Pooling(task="score")
    scored, other = asked(Prompt(1, text="a", query="q"), Prompt(1, text="b"), pooling=pooling)
    assert scored.pooling == msgspec.structs.replace(pooling, query="q")
    assert other.pooling == pooling
    assert asked(Prompt(1, text="a", query="q"))[0].pooling is None


END = Delta("r", 0, 0, finish=Finish("stop"))
REFUSAL = ApiError(503, "full")


def test_sequences_that_begin_later_are_promised_too() -> None:
    flights: list[Any] = []

    def submit(index: int, sink: Sink) -> Flight:
        flights.append(SimpleNamespace(sink=sink, is_promised=False))
        return cast("Flight", flights[-1])

    window = SequenceWindow(submit, lambda ended: None, [ListSink() for _ in range(3)], 1)
    window.begin()
    flights[0].sink.deliver(END)
    assert [each.is_promised for each in flights] == [False, False]
    window.promise()
    flights[1].sink.deliver(END)
    assert [each.is_promised for each in flights] == [True, True, True]


class Queue:
    """Stands for the dispatcher: flights are the numbers of sequences."""

    def __init__(self, refuses: int | None = None) -> None:
        self.sinks: dict[int, Sink] = {}
        self.cancelled: list[Any] = []
        self.refuses = refuses

    def submit(self, index: int, sink: Sink) -> Flight:
        if index == self.refuses:
            raise REFUSAL
        assert index not in self.sinks
        self.sinks[index] = sink
        return cast("Flight", index)

    def cancel(self, flights: Iterable[Flight]) -> None:
        self.cancelled += flights


def window_of(count: int, size: int, refuses: int | None = None) -> tuple[Queue, list[ListSink], SequenceWindow]:
    queue, sinks = Queue(refuses), [ListSink() for _ in range(count)]
    return queue, sinks, SequenceWindow(queue.submit, queue.cancel, sinks, size)


def test_next_sequence_goes_when_one_has_ended() -> None:
    queue, sinks, window = window_of(7, 3)
    window.begin()
    order = [1, 0, 3, 2, 4, 6, 5]
    for number, index in enumerate(order):
        assert len(queue.sinks) == min(7, 3 + number)
        queue.sinks[index].deliver(Delta("r", 0, 0, prompt_tokens=3))
        assert len(queue.sinks) == min(7, 3 + number)
        queue.sinks[index].deliver(END)
    assert all(sink.deltas[-1] is END for sink in sinks)
    assert window.flights == list(range(7))


def test_few_sequences_go_at_once_to_their_own_sinks() -> None:
    queue, sinks, window = window_of(3, 3)
    window.begin()
    assert list(queue.sinks.values()) == sinks


def test_nothing_goes_after_a_failure_or_a_cancellation() -> None:
    for end in ("fail", "cancel"):
        queue, _, window = window_of(7, 3)
        window.begin()
        if end == "fail":
            queue.sinks[1].fail(REFUSAL)
        else:
            window.cancel()
            assert queue.cancelled == [0, 1, 2]
        queue.sinks[0].deliver(END)
        assert len(queue.sinks) == 3


def test_refusal_at_the_beginning_takes_the_others_back() -> None:
    queue, _, window = window_of(7, 3, refuses=2)
    with pytest.raises(ApiError):
        window.begin()
    assert queue.cancelled == [0, 1]


def test_later_refusal_goes_to_the_sink_of_the_sequence() -> None:
    queue, sinks, window = window_of(7, 3, refuses=3)
    window.begin()
    queue.sinks[0].deliver(END)
    queue.sinks[1].deliver(END)
    assert (sinks[3].error, sinks[3].endings) == (REFUSAL, 1)
    assert len(queue.sinks) == 3
