"""What answers report besides their text, in chunks and in whole answers, of text alone and of text that is read."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from gateway.admission.auth import Principal
from gateway.admission.limits import reserved_tokens
from gateway.api.answer import Asked, ResponseHead
from gateway.api.chat_answers import AnswerIdentity
from gateway.api.details import ChoiceDetails, DetailedSink, RankedSink, likeliest
from gateway.api.streamed import ChoiceChunks
from gateway.api.whole import WholeAnswer
from gateway.cache.prompt_cache import cache_key
from gateway.cache.recording import as_cached
from gateway.errors import ApiError
from gateway.generation import Details, Generation, Kind, OutputReading
from shared.messages import Delta, Finish, TokenLogprob, Usage
from tests.gateway import parsed_bodies
from tests.gateway.api.scripted_reader import ScriptedReader
from tests.gateway.dispatch_bench import ListSink
from tests.gateway.kept_exchange import kept_exchange

ENTRY = TokenLogprob(5, "a", b"a", -0.5, (TokenLogprob(6, "b", b"b", -0.25),))


def event(chunk: bytes) -> dict[str, Any]:
    return json.loads(chunk.removeprefix(b"data: "))  # type: ignore[no-any-return]


def identity(kind: Kind) -> AnswerIdentity:
    return AnswerIdentity("x-1", kind, "m", 7, "fp_1")


def noted(wanted: Details, kind: Kind, *deltas: Delta) -> tuple[ChoiceDetails, ListSink]:
    details, kept = ChoiceDetails(wanted, kind), ListSink()
    sink = DetailedSink(kept, details)
    for delta in deltas:
        sink.deliver(delta)
    return details, kept


FIRST = Delta("r", 0, 0, (5,), "a", prompt_logprobs=(None, ENTRY), prompt_tokens=2, prompt_token_ids=(1, 5))
SECOND = Delta("r", 0, 1, (6, 7), "b", logprobs=(ENTRY,))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_token_ids_are_those_since_the_last_chunk_and_the_prompts_come_once(kind: Kind) -> None:
    details = ChoiceDetails(Details(token_ids=True), kind)
    chunks = ChoiceChunks(identity(kind), 0, False, details)
    details.note(FIRST)
    details.note(Delta("r", 0, 1, (6,), ""))
    first = event(chunks.text(FIRST.text, ()))
    details.note(SECOND)
    last = event(chunks.finish("stop", UNSET))
    assert [chunk["choices"][0]["token_ids"] for chunk in (first, last)] == [[5, 6], [6, 7]]
    holder = first if kind == "chat" else first["choices"][0]
    assert holder["prompt_token_ids"] == [1, 5]
    assert "prompt_token_ids" not in last | last["choices"][0]
    assert first["system_fingerprint"] == "fp_1"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_prompt_logprobs_stand_apart(kind: Kind) -> None:
    details, kept = noted(Details(prompt_logprobs=True), kind, FIRST)
    chunks = ChoiceChunks(identity(kind), 0, False, details)
    first, second = (event(chunks.text("a", ())) for _ in range(2))
    holder = first if kind == "chat" else first["choices"][0]
    assert holder["prompt_logprobs"] == [
        None,
        {
            "5": {"logprob": -0.5, "rank": None, "decoded_token": "a"},
            "6": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        },
    ]
    assert "prompt_logprobs" not in second | second["choices"][0]
    assert kept.deltas[0].prompt_logprobs is None
    _, kept = noted(Details(prompt_logprobs=True, echoes_logprobs=True), kind, FIRST)
    assert kept.deltas == [msgspec.structs.replace(FIRST, prompt_token_ids=None)]


def test_chunks_of_text_that_is_read_have_log_probabilities_where_there_are_any() -> None:
    chunks = ChoiceChunks(identity("chat"), 0, False)
    for logprobs, tokens in (((), None), ((ENTRY,), ["a"])):
        found = event(chunks.text("a", logprobs))["choices"][0]["logprobs"]
        assert (None if found is None else [entry["token"] for entry in found["content"]]) == tokens


@pytest.mark.parametrize("with_usage", [False, True])
def test_usage_so_far_is_in_every_chunk(with_usage: bool) -> None:
    details = ChoiceDetails(Details(usage_so_far=True), "chat")
    chunks = ChoiceChunks(identity("chat"), 0, with_usage, details)
    usages = []
    for delta in (FIRST, SECOND):
        details.note(delta)
        usages.append(event(chunks.text(delta.text, ()))["usage"])
    assert usages == [
        {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    ]
    assert event(chunks.reasoning("r", ()))["usage"]["total_tokens"] == 5
    assert event(chunks.arguments(0, "{", ()))["usage"]["total_tokens"] == 5


def test_tokens_are_called_by_their_ids() -> None:
    _, kept = noted(Details(tokens_as_ids=True, echoes_logprobs=True), "completion", FIRST, SECOND)
    [entry] = kept.deltas[1].logprobs or ()
    assert (entry.token, entry.top[0].token, entry.bytes) == ("token_id:5", "token_id:6", b"a")
    prompt = kept.deltas[0].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert prompt[1] == entry
    assert kept.deltas[0].logprobs is None


def test_opening_comes_once_and_with_the_first_token() -> None:
    claim = Delta("r", 0, 0, prompt_tokens=2)
    _, kept = noted(Details(opening="so: "), "chat", claim, FIRST, SECOND)
    assert [delta.text for delta in kept.deltas] == ["", "so: a", "b"]


def test_failure_is_passed_on() -> None:
    kept, wanted = ListSink(), Details(token_ids=True)
    error = ApiError(500, "no")
    DetailedSink(kept, ChoiceDetails(wanted, "chat")).fail(error)
    assert (kept.error, kept.endings) == (error, 1)


Sequence = list[Delta]


asked = partial(parsed_bodies.completion, seed=1)
chat = partial(parsed_bodies.chat, seed=1)


def sequence(number: int, chance: random.Random) -> Sequence:
    """Return an answer of a random length with random log probabilities, the last token without text."""
    num_tokens = chance.randint(1, 9)
    deltas = []
    for position in range(num_tokens):
        entry = TokenLogprob(position, "a", b"a", -chance.expovariate(1.0))
        text = f"{number}." if position < num_tokens - 1 else ""
        deltas.append(Delta("r", 0, position, (position,), text, logprobs=(entry,), prompt_tokens=3))
    return [*deltas, Delta("r", 0, num_tokens, finish=Finish("stop", Usage(3, num_tokens)))]


def answer(generation: Generation, sequences: list[Sequence]) -> dict[str, Any]:
    """Return the JSON that is told of these sequences, whose deltas come in turns."""
    exchange, _, transport = kept_exchange()
    identity = AnswerIdentity("x-1", generation.kind, "m", 7)
    told = WholeAnswer(Asked(exchange, generation, ResponseHead("req_1", 0.0), Principal("k", "t")), identity)
    for position in range(max(map(len, sequences))):
        for sink, deltas in zip(told.sinks, sequences, strict=True):
            for delta in deltas[position : position + 1]:
                sink.deliver(delta)
    return transport.body()  # type: ignore[no-any-return]


def by_hand(choices: list[dict[str, Any]], num_prompts: int, n: int, kind: str) -> list[dict[str, Any]]:
    """Rank choices that show the log probabilities of their tokens."""

    def mean(choice: dict[str, Any]) -> float:
        shown = choice["logprobs"]
        each = [one["logprob"] for one in shown["content"]] if kind == "chat" else shown["token_logprobs"]
        return sum(each) / len(each)

    per_prompt = len(choices) // num_prompts
    best: list[dict[str, Any]] = []
    for first in range(0, len(choices), per_prompt):
        best += sorted(choices[first : first + per_prompt], key=mean, reverse=True)[:n]
    return [choice | {"index": index} for index, choice in enumerate(best)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shows_logprobs", [True, False])
async def test_best_answers_of_each_prompt_are_told_in_their_order(seed: int, shows_logprobs: bool) -> None:
    chance = random.Random(seed)
    sequences = [sequence(number, chance) for number in range(10)]
    reference = answer(asked(prompt=["x", "y"], n=5, logprobs=0), sequences)
    shown = {"logprobs": 0} if shows_logprobs else {}
    told = answer(asked(prompt=["x", "y"], n=2, best_of=5, **shown), sequences)
    expected = by_hand(reference["choices"], 2, 2, "completion")
    assert told["choices"] == [each if shows_logprobs else each | {"logprobs": None} for each in expected]
    # The tokens of all are generated, and counted.
    assert told["usage"] == reference["usage"]


async def test_chat_answers_that_are_read_are_ranked_too() -> None:
    chance = random.Random(3)
    sequences = [sequence(number, chance) for number in range(4)]
    reading = OutputReading(ScriptedReader)
    reference = answer(msgspec.structs.replace(chat(n=4, logprobs=True), reading=reading), sequences)
    told = answer(msgspec.structs.replace(chat(n=3, best_of=4), reading=reading), sequences)
    expected = by_hand(reference["choices"], 1, 3, "chat")
    assert told["choices"] == [each | {"logprobs": None} for each in expected]


async def test_repeated_answer_is_the_first_one() -> None:
    chance = random.Random(5)
    sequences = [sequence(number, chance) for number in range(6)]
    wanted = asked(n=2, best_of=6, return_token_ids=True)
    first = answer(wanted, sequences)
    assert [choice["token_ids"] for choice in first["choices"]] == [
        list(range(len(choice["token_ids"]))) for choice in first["choices"]
    ]
    # As the cache repeats it.
    assert answer(wanted, [list(map(as_cached, deltas)) for deltas in sequences])["choices"] == first["choices"]


def test_cached_are_all_sequences_so_that_another_number_of_the_best_is_told_of_them() -> None:
    key = cache_key("t", asked(best_of=3), ())
    assert key != cache_key("t", asked(), ())
    assert key != cache_key("t", asked(best_of=4), ())
    assert key == cache_key("t", asked(best_of=3, n=2), ()) == cache_key("t", asked(n=3, logprobs=0), ())


def test_equally_likely_ones_keep_their_order() -> None:
    sinks = [RankedSink(ListSink(), shows_logprobs=True) for _ in range(6)]
    for sink, logprob in zip(sinks, (-1.0, -0.5, -1.0, -2.0, -2.0, float("-inf")), strict=True):
        sink.deliver(Delta("r", 0, 0, (5,), "a", logprobs=(TokenLogprob(5, "a", b"a", logprob),)))
    assert likeliest([sink.mean_logprob for sink in sinks], 3, 2) == [1, 0, 3, 4]
    assert RankedSink(ListSink(), shows_logprobs=True).mean_logprob == 0


async def test_tokens_before_a_move_to_another_worker_count() -> None:
    """The tokens behind the move alone would be the likeliest."""

    def told(start: int, text: str, *logprobs: float, epoch: int = 0) -> Sequence:
        entries = [TokenLogprob(5, "a", b"a", logprob) for logprob in logprobs]
        return [Delta("r", epoch, start + i, (5,), text, logprobs=(entry,)) for i, entry in enumerate(entries)]

    def done(num_tokens: int, epoch: int = 0) -> Delta:
        return Delta("r", epoch, num_tokens, finish=Finish("stop", Usage(3, num_tokens)))

    moved = [*told(0, "moved", -6.0, -6.0), *told(2, "", -0.1, epoch=1), done(3, epoch=1)]
    body = answer(asked(best_of=2), [moved, [*told(0, "steady", -2.0), *told(1, "", -2.0), done(2)]])
    assert [choice["text"] for choice in body["choices"]] == ["steady"]
    assert body["usage"]["completion_tokens"] == 5


def test_failure_of_one_is_passed_on() -> None:
    kept, error = ListSink(), ApiError(500, "no")
    RankedSink(kept, shows_logprobs=False).fail(error)
    assert (kept.error, kept.endings) == (error, 1)


@pytest.mark.parametrize("parse", [asked, chat])
def test_all_sequences_count_and_each_has_its_log_probabilities(parse: Any) -> None:
    generation = parse(best_of=4)
    assert (generation.num_sequences, generation.num_at_once, generation.num_choices) == (4, 4, 1)
    assert generation.sampling.logprobs == 0
    # The tokens of all are reserved from the key's budget.
    assert reserved_tokens(parse(best_of=4, max_tokens=10))[0] == generation.estimated_prompt_tokens + 40
    assert parse(best_of=1) == parse()
    # All answers are equal where the likeliest token is taken each time.
    greedy = parse(best_of=4, n=2, temperature=0)
    assert (greedy.num_sequences, greedy.num_choices, greedy.sampling.logprobs) == (2, 2, None)
    assert parse(best_of=2, n=2, stream=True).num_sequences == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 3, "best_of": 2}, "'best_of' is 2 and 'n' is 3"),
        ({"best_of": 2, "stream": True}, "Results cannot be streamed"),
        ({"best_of": 65, "prompt": ["x", "y"]}, "'best_of' times the number of prompts is 130; at most 128"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        asked(**fields)
    assert (refused.value.status, refused.value.param) == (400, "best_of")
