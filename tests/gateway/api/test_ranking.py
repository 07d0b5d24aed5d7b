"""`best_of`: the likeliest of several answers, against a ranking by hand of the same answers with log probabilities."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.admission.limits import reserved_tokens
from gateway.api.answer import Asked, ResponseHead
from gateway.api.chat_answers import AnswerIdentity
from gateway.api.details import RankedSink, likeliest
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.api.whole import WholeAnswer
from gateway.cache.prompt_cache import cache_key
from gateway.cache.recording import as_cached
from gateway.errors import ApiError
from gateway.generation import Generation, OutputReading
from shared.messages import Delta, Finish, TokenLogprob, Usage
from tests.gateway.api.scripted_reader import ScriptedReader
from tests.gateway.dispatch_bench import ListSink
from tests.gateway.kept_exchange import kept_exchange

Sequence = list[Delta]


def asked(**fields: Any) -> Generation:
    return parse_completion(json.dumps({"model": "m", "prompt": "x", "seed": 1, **fields}).encode())


def chat(**fields: Any) -> Generation:
    messages = [{"role": "user", "content": "x"}]
    return parse_chat(json.dumps({"model": "m", "messages": messages, "seed": 1, **fields}).encode())


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
    assert reserved_tokens(parse(best_of=4, max_tokens=10)) == generation.estimated_prompt_tokens + 40
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
