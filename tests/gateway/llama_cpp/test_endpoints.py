"""`/infill` of a gateway process: a completion with a suffix, answered in llama.cpp's form."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from gateway.admission.auth import KeyStore, Principal
from gateway.admission.limits import RateLimiter
from gateway.api.answer import Outcome, ResponseHead
from gateway.api.app import create_app
from gateway.api.endpoint import Asked, StreamParts
from gateway.api.large_bodies import LargeBodies
from gateway.api.routes import RouteServices
from gateway.api.schemas.known_names import BodyRules
from gateway.api.tokenizer_client import TokenizerClient
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet, FleetLimits
from gateway.fleet.fleet_load import OwnRequests
from gateway.generation import Generation, Prompt
from gateway.llama_cpp.endpoints import InfillEndpoint, LlamaCppRoutes, _told
from gateway.metrics import GatewayMetrics
from gateway.streams.event_stream import Flusher
from shared.messages import Delta, Finish, Usage, encode
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.subjects import tokenizer_subject
from shared.tokenizer_calls import TemplateCall, TokenizeCall, TokenizerReply
from tests.gateway.api.test_app import KEY, NO_SERVICE, client_of, heartbeat
from tests.gateway.api.test_streamed import LIMITS, events
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.image_intake import image_intake
from tests.gateway.kept_exchange import kept_exchange
from tests.gateway.known_worker import known_worker
from tests.gateway.shared_gateway import gateway, nats_url

__all__ = ["gateway", "nats_url"]

ASKED = {"input_prefix": "def f(", "input_suffix": "): pass", "prompt": "a", "n_predict": 2, "cache_prompt": True}


async def test_text_between_prefix_and_suffix_is_asked_for_and_told(gateway: GatewayProcess, nats_url: str) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with known_worker(nats_url, gateway) as worker, httpx2.AsyncClient(headers=headers) as http:
        for stream in (False, True):
            body = ASKED | {"model": worker.model, "stream": stream}
            asking = asyncio.create_task(http.post(f"{gateway.url}/infill", json=body))
            request = await worker.begin(2)
            assert (request.text, request.suffix, request.sampling.max_tokens) == ("def f(a", "): pass", 2)
            await worker.end(request, 2, Finish("stop", Usage(3, 2, 1), stop="x"))
            answer = await asking
            lines = answer.text.split("\n\n")[:-1] if stream else [answer.text]
            pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
            assert "".join(piece["content"] for piece in pieces) == "0 1 "
            assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            end = {"stop_type": "word", "stopping_word": "x", "tokens_predicted": 2, "tokens_evaluated": 3}
            assert pieces[-1].items() >= end.items()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_suffix": ""}, "input_suffix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": [{"filename": "a", "text": "b"}]}, "input_extra"),
        ({"temperature": 9}, "temperature"),
        ({"n": 2}, "n"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_wrong_body_is_a_400_that_names_the_field(
    gateway: GatewayProcess, fields: dict[str, object], param: str
) -> None:
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {API_KEY}"}) as http:
        answer = await http.post(f"{gateway.url}/infill", json=ASKED | {"model": "m"} | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


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
        exchange, _, self.transport = kept_exchange()
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
        return self.transport.sent


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
    told = infilled.transport.body()
    assert told == json.loads(_told("m", "abc", Finish("stop", Usage(3, 2, 1), stop="x")))
    assert infilled.answer.num_tokens == 5


Call = TemplateCall | TokenizeCall
AUTH = {"Authorization": f"Bearer {KEY}"}
CONVERSATION = {"messages": [{"role": "user", "content": "hi"}]}


class Served:
    """The routes of a gateway whose only worker is of the model `served`."""

    def __init__(self, connection: Client, http: httpx2.AsyncClient, fleet: Fleet) -> None:
        self.connection = connection
        self.http = http
        self.fleet = fleet
        self.calls: list[Call] = []

    async def answer(self, reply: TokenizerReply) -> None:
        decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)

        async def respond(message: Msg) -> None:
            self.calls.append(decoder.decode(message.data))
            await message.respond(encode(reply))

        await self.connection.subscribe(tokenizer_subject("served"), cb=respond)
        await self.connection.flush()


@pytest.fixture
async def served(nats_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    connection = await connect(nats_url, role="gateway", name="g")
    fleet = Fleet("g", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
    fleet.note_heartbeat(heartbeat("served", running=3), time.monotonic())
    metrics = GatewayMetrics()
    services = RouteServices(
        config=GatewayConfig(),
        keys=KeyStore(tmp_path / "keys.json", KEY, metrics),
        limiter=RateLimiter(None, metrics),
        fleet=fleet,
        queue=connection,
        tokenizer=TokenizerClient(connection, timeout_s=2.0),
        metrics=metrics,
        images=image_intake(connection),
    )
    app = create_app(services, NO_SERVICE, [], LlamaCppRoutes(services).routes())
    async with client_of(app, AUTH) as http:
        yield Served(connection, http, fleet)
    await connection.close()


async def test_properties_are_those_of_the_model_and_its_workers(served: Served) -> None:
    await served.answer(TokenizerReply(text="{{ messages }}", max_model_len=512))
    expected: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": 512},
        # What runs, and what could start beside it.
        "total_slots": 8,
        "model_alias": "served",
        "chat_template": "{{ messages }}",
        "build_info": f"headrace {version('headrace')}",
        "modalities": {"vision": False, "audio": False},
    }
    assert (await served.http.get("/props")).json() == expected
    served.fleet.note_heartbeat(heartbeat("other"), time.monotonic())
    assert (await served.http.get("/props", params={"model": "served"})).json() == expected
    answer = await served.http.get("/props")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert (await served.http.get("/props", params={"model": "none"})).status_code == 404
    assert all(isinstance(call, TemplateCall) for call in served.calls)
    assert len(served.calls) == 2


async def test_prompt_is_what_the_template_makes_of_the_conversation(served: Served) -> None:
    await served.answer(TokenizerReply(text="<user>hi"))
    answer = await served.http.post("/apply-template", json=CONVERSATION)
    assert (answer.status_code, answer.json()) == (200, {"prompt": "<user>hi"})
    (call,) = served.calls
    assert isinstance(call, TokenizeCall)
    assert call.renders
    assert call.messages is not None
    assert call.messages[0].content == "hi"


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": "x"}, "messages"), (CONVERSATION | {"nonsense": 1}, "nonsense")]
)
async def test_template_of_what_is_no_conversation_is_refused(served: Served, body: dict[str, Any], param: str) -> None:
    answer = await served.http.post("/apply-template", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("method", "path"), [("GET", "/props"), ("POST", "/apply-template")])
async def test_routes_need_a_key(served: Served, method: str, path: str) -> None:
    answer = await served.http.request(method, path, json=CONVERSATION, headers={"Authorization": "Bearer wrong"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_question_counts_as_a_request_without_tokens(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, int]] = []
    released: list[bool] = []

    async def admit(limiter: RateLimiter, principal: object, num_sequences: int, tokens: int) -> object:
        counted.append((num_sequences, tokens))
        return SimpleNamespace(release=lambda: released.append(True))

    monkeypatch.setattr(RateLimiter, "admit", admit)
    await served.answer(TokenizerReply(text="<user>hi"))
    assert (await served.http.post("/apply-template", json=CONVERSATION)).status_code == 200
    assert (counted, released) == ([(1, 0)], [True])
