"""What `/infill` asks of a model, and how its answers are written, piece by piece."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.admission.auth import Principal
from gateway.api.answer import Outcome, ResponseHead
from gateway.api.endpoint import Asked, StreamParts
from gateway.api.large_bodies import LargeBodies
from gateway.api.schemas.known_names import BodyRules
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from gateway.http1.body import BodyBudget, RequestBody
from gateway.http1.exchange import Exchange
from gateway.http1.head import parse_head
from gateway.llama_cpp.infill import InfillEndpoint, _told
from gateway.streams.event_stream import Flusher
from shared.messages import Delta, Finish, Usage
from shared.sampling import Sampling
from tests.gateway.api.test_streamed import LIMITS, Channel, KeepingTransport, events

PRINCIPAL = Principal("key", "tenant")


async def asked(body: dict[str, Any], allow_unknown: bool = False) -> Generation:
    """Ask a fleet with one model, `only`."""
    rules = BodyRules(allow_unknown, only_model=lambda: "only")
    return await InfillEndpoint(LargeBodies()).generation(json.dumps(body).encode(), PRINCIPAL, rules)


async def test_prefix_and_prompt_are_one_text_and_no_limit_is_none() -> None:
    generation = await asked({"input_prefix": "a", "prompt": "b", "input_suffix": "c", "input_extra": []})
    (prompt,) = generation.prompts
    assert (generation.model, prompt.text, prompt.suffix) == ("only", "ab", "c")
    assert generation.sampling.max_tokens is None
    assert not generation.stream


async def test_suffix_alone_is_enough_and_parameters_of_completions_are_read() -> None:
    body = {"model": "m", "input_suffix": "c", "n_predict": 5, "stop": ["x"], "stream": True, "temperature": 0.5}
    generation = await asked(body)
    (prompt,) = generation.prompts
    assert (generation.model, prompt.text, prompt.suffix, generation.stream) == ("m", "", "c", True)
    assert (generation.sampling.max_tokens, generation.sampling.temperature) == (5, 0.5)
    assert generation.sampling.stop == ("x",)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input_suffix": ""}, "input_suffix", "must not be empty"),
        ({"input_extra": [{"text": "b"}]}, "input_extra", "input_prefix"),
        ({"n": 2}, "n", "must be 1"),
        ({"nonsense": 1}, "nonsense", "nonsense"),
    ],
)
async def test_what_cannot_be_asked_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        await asked({"input_suffix": "c"} | fields)
    assert (refused.value.status, refused.value.param) == (400, param)


async def test_unknown_parameters_are_left_out_where_the_settings_say_so() -> None:
    generation = await asked({"input_suffix": "c", "nonsense": 1}, allow_unknown=True)
    assert generation.model == "only"


def test_piece_in_between_says_no_more_than_its_text() -> None:
    assert json.loads(_told("m", "t", None)) == {"index": 0, "content": "t", "stop": False, "model": "m"}


@pytest.mark.parametrize(
    ("finish", "kind", "word"),
    [
        (Finish("length", Usage(3, 2, 1)), "limit", ""),
        (Finish("length", Usage(3, 2, 1), stop="x"), "limit", "x"),
        (Finish("stop", Usage(3, 2, 1), stop="x"), "word", "x"),
        (Finish("stop", Usage(3, 2, 1), stop=7), "eos", ""),
        (Finish("stop", Usage(3, 2, 1)), "eos", ""),
    ],
)
def test_last_piece_says_how_it_ended_and_what_it_took(finish: Finish, kind: str, word: str) -> None:
    assert json.loads(_told("m", "t", finish)) == {
        "index": 0,
        "content": "t",
        "stop": True,
        "model": "m",
        "stop_type": kind,
        "stopping_word": word,
        "tokens_evaluated": finish.usage.prompt_tokens if finish.usage else None,
        "tokens_predicted": finish.usage.completion_tokens if finish.usage else None,
        "tokens_cached": finish.usage.cached_tokens if finish.usage else None,
    }


def test_end_of_a_worker_that_counted_nothing_counts_nothing() -> None:
    fields = json.loads(_told("m", "t", Finish("stop")))
    assert [fields[name] for name in ("tokens_evaluated", "tokens_predicted", "tokens_cached")] == [0, 0, 0]


class Infilled:
    """An answer that is written to a transport."""

    def __init__(self, *, stream: bool) -> None:
        self.transport = KeepingTransport()
        request = parse_head(b"POST /infill HTTP/1.1\r\nHost: t\r\n\r\n")
        exchange = Exchange(Channel(self.transport), request, RequestBody(lambda: None, BodyBudget(1 << 20, 1)))
        generation = Generation(
            "completion", "m", (Prompt(1, text="x"),), 1, Sampling(), deterministic=False, stream=stream
        )
        infill = InfillEndpoint(LargeBodies())
        asked = Asked(exchange, generation, ResponseHead("req_1", 0.0, infill.dialect), PRINCIPAL)
        parts = StreamParts(Flusher(asyncio.get_running_loop()), LIMITS, 0.0)
        self.answer = infill.streamed_answer(asked, parts) if stream else infill.whole_answer(asked)

    def say(self, text: str, *token_ids: int, finish: Finish | None = None) -> None:
        self.answer.sinks[0].deliver(Delta("r", 0, 0, token_ids, text, finish))

    @property
    def sent(self) -> bytes:
        return b"".join(self.transport.writes)


async def test_first_piece_is_written_at_once_and_the_rest_together() -> None:
    infilled = Infilled(stream=True)
    infilled.say("")
    assert (infilled.sent, infilled.answer.first_token_at) == (b"", None)
    infilled.say("a", 1)
    first_at = infilled.answer.first_token_at
    assert first_at is not None
    assert len(events(infilled.sent)) == 1
    infilled.say("b", 2)
    infilled.say("", 3)
    infilled.say("c", 3)
    assert len(events(infilled.sent)) == 1
    await asyncio.sleep(0.01)
    assert len(events(infilled.sent)) == 3
    infilled.say("", finish=Finish("stop", Usage(3, 2, 1)))
    infilled.say("late", 4)
    assert infilled.answer.done.result() is Outcome.COMPLETED
    assert infilled.answer.first_token_at == first_at
    assert infilled.answer.num_tokens == 5
    assert b"0\r\n\r\n" in infilled.sent


async def test_stream_ends_with_its_last_piece_and_no_mark() -> None:
    infilled = Infilled(stream=True)
    infilled.say("a", 1)
    infilled.say("b", 2, finish=Finish("length", Usage(3, 2, 1)))
    pieces = infilled.sent.partition(b"\r\n\r\n")[2]
    assert b"[DONE]" not in pieces
    told = [json.loads(line.removeprefix(b"data: ")) for line in pieces.split(b"\n") if line.startswith(b"data: ")]
    assert [(piece["content"], piece["stop"]) for piece in told] == [("a", False), ("b", True)]


async def test_whole_answer_is_all_text_once_it_has_ended() -> None:
    infilled = Infilled(stream=False)
    infilled.say("")
    assert infilled.answer.first_token_at is None
    infilled.say("a", 1)
    infilled.say("b", 2)
    assert infilled.answer.first_token_at is not None
    assert infilled.sent == b""
    infilled.say("c", finish=Finish("stop", Usage(3, 2, 1), stop="x"))
    assert infilled.answer.done.result() is Outcome.COMPLETED
    told = json.loads(infilled.sent.partition(b"\r\n\r\n")[2])
    assert told == json.loads(_told("m", "abc", Finish("stop", Usage(3, 2, 1), stop="x")))
    assert infilled.answer.num_tokens == 5
