"""`GET /props` and `POST /apply-template`, over HTTP, with a worker that answers as the test tells it to."""

from __future__ import annotations

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

from gateway.admission.auth import KeyStore
from gateway.admission.limits import RateLimiter
from gateway.api.app import create_app
from gateway.api.routes import RouteServices
from gateway.api.tokenizer_client import TokenizerClient
from gateway.config import GatewayConfig
from gateway.fleet.claims import OwnRequests
from gateway.fleet.fleet import Fleet, FleetLimits
from gateway.llama_cpp.routes import LlamaCppRoutes
from gateway.metrics import GatewayMetrics
from shared.messages import encode
from shared.nats_connection import connect
from shared.subjects import tokenizer_subject
from shared.tokenizer_calls import TemplateCall, TokenizeCall, TokenizerReply
from tests.gateway.api.test_app import KEY, NO_SERVICE, client_of, heartbeat

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
