"""The public application over HTTP: who may call what, and that every error has the four keys."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import httpx2
import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.admission.api_keys import create_key
from gateway.admission.auth import KeyStore, Principal
from gateway.admission.limits import RateLimiter
from gateway.admission.stored_reads import StoredReads
from gateway.anthropic.dialect import ANTHROPIC
from gateway.anthropic.message import MessagesEndpoint
from gateway.api.app import create_app
from gateway.api.endpoint import ChatEndpoint, CompletionEndpoint
from gateway.api.generation_service import GenerationService
from gateway.api.large_bodies import LargeBodies
from gateway.api.routes import KeyRoute, Routes, RouteServices
from gateway.api.tokenizer_client import MAX_CALLS, MAX_CALLS_OF_ONE, TokenizerClient
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet, FleetLimits
from gateway.fleet.fleet_load import OwnRequests
from gateway.http1.handlers import AsgiHandler
from gateway.media.fetch import AllowedHosts, ImageFetcher
from gateway.media.intake import ImageIntake, ImageLimits
from gateway.metrics import GatewayMetrics
from shared.adapter_calls import AdapterBeat
from shared.conversation import ChatOptions
from shared.features import IMAGES
from shared.hosted_models import HostBeat, HostedModel
from shared.media_store import MediaStore
from shared.messages import Heartbeat, encode
from shared.nats_connection import connect
from shared.subjects import tokenizer_subject
from shared.tokenizer_calls import DetokenizeCall, TokenizeCall, TokenizerReply
from tests.gateway.admission.test_limits import limited
from tests.gateway.http1.raw_server import served
from tests.waiting import until

KEY = "hr-test"
AUTH = {"Authorization": f"Bearer {KEY}"}
TOKENIZER_TIMEOUT_S = 5.0

BODIES = LargeBodies()
ENDPOINTS = [ChatEndpoint(BODIES), CompletionEndpoint(BODIES)]
# Nothing is generated here.
NO_SERVICE = cast("GenerationService", None)


def heartbeat(model: str, **changes: Any) -> Heartbeat:
    values: dict[str, Any] = {
        "worker": f"worker-of-{model}",
        "model": model,
        "step": 1,
        "running": 0,
        "waiting": 0,
        "waiting_tokens": 0,
        "free_blocks": 10,
        "total_blocks": 10,
        "block_size": 16,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "prefill_rate": 0.0,
        "decode_rate": 0.0,
        "queue_pending": 0,
    }
    return Heartbeat(**{**values, **changes})


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[Client]:
    client = await connect(nats_url, role="gateway", name="g")
    yield client
    await client.close()


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet("g", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
    fleet.named_adapters.read_at = math.inf
    fleet.note_heartbeat(heartbeat("org/demo"), time.monotonic())
    return fleet


@pytest.fixture
def services(connection: Client, fleet: Fleet, tmp_path: Path) -> RouteServices:
    metrics = GatewayMetrics()
    limiter = RateLimiter(None, metrics)
    return RouteServices(
        config=GatewayConfig(max_body_bytes=4096),
        keys=KeyStore(tmp_path / "keys.json", KEY, metrics),
        limiter=limiter,
        reads=StoredReads(limiter),
        fleet=fleet,
        queue=connection,
        tokenizer=TokenizerClient(connection, timeout_s=TOKENIZER_TIMEOUT_S),
        metrics=metrics,
        images=ImageIntake(MediaStore(connection.jetstream()), ImageLimits(), ImageFetcher(AllowedHosts(), 1 << 20)),
    )


@asynccontextmanager
async def client_of(app: ASGIApp, headers: dict[str, str] | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    async with served(AsgiHandler(app, 4096)) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
            yield client


@pytest.fixture
async def http(services: RouteServices) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(create_app(services, NO_SERVICE, ENDPOINTS), AUTH) as client:
        yield client


def assert_error(answer: httpx2.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [("GET", "/v1/messages", 405, "invalid_request_error"), ("GET", "/v1/messages/batches", 404, "not_found_error")],
)
async def test_what_is_no_route_of_an_api_is_told_in_its_form(
    services: RouteServices, method: str, path: str, status: int, kind: str
) -> None:
    app = create_app(services, NO_SERVICE, [*ENDPOINTS, MessagesEndpoint(BODIES)])
    async with client_of(app, AUTH) as client:
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.json()["type"] == "error"
        assert_error(await client.get("/v1/messagesandmore"), 404, "unknown_url")


async def test_models_are_those_of_live_workers_that_the_key_may_use(
    http: httpx2.AsyncClient, fleet: Fleet, services: RouteServices, tmp_path: Path
) -> None:
    fleet.note_heartbeat(heartbeat("other"), time.monotonic())
    answer = (await http.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["org/demo", "other"]
    created = datetime.fromtimestamp(answer["data"][0]["created"], UTC)
    assert answer["data"][0] | {"created": 0} == {
        "id": "org/demo",
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
        "root": "org/demo",
        "parent": None,
        "max_model_len": 512,
        "type": "model",
        "display_name": "org/demo",
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": 512,
        "architecture": {"input_modalities": ["text"]},
        "capabilities": {"image_input": {"supported": False}},
    }
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, "org/demo", "other")
    _, narrow = create_key(tmp_path / "narrow.json", tenant="t", models=("other",))
    store = KeyStore(tmp_path / "narrow.json", None, services.metrics)
    async with client_of(
        create_app(replace(services, keys=store), NO_SERVICE, ENDPOINTS), {"Authorization": f"Bearer {narrow}"}
    ) as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["other"]
        assert_error(await client.get("/v1/models/org/demo"), 404, "model_not_found")
        assert_error(await client.post("/tokenize", json={"model": "org/demo", "prompt": "x"}), 404, "model_not_found")


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ("", "a b c org/demo", False),
        ("?limit=2", "a b", True),
        ("?limit=4", "a b c org/demo", False),
        ("?limit=2&after_id=a", "b c", True),
        ("?limit=2&after_id=b", "c org/demo", False),
        ("?after_id=org/demo", "", False),
        ("?limit=2&before_id=org/demo", "b c", True),
        ("?limit=3&before_id=org/demo", "a b c", False),
        # The last model of the page before has gone.
        ("?limit=2&after_id=bb", "c org/demo", False),
        ("?limit=2&before_id=bb", "a b", False),
    ],
)
async def test_models_are_listed_in_pages_where_they_are_asked_for(
    http: httpx2.AsyncClient, fleet: Fleet, query: str, names: str, has_more: bool
) -> None:
    for name in "abc":
        fleet.note_heartbeat(heartbeat(name), time.monotonic())
    page = (await http.get(f"/v1/models{query}")).json()
    assert ([model["id"] for model in page["data"]], page["has_more"]) == (names.split(), has_more)


async def test_pages_of_models_are_sorted_and_the_whole_list_is_as_before(
    http: httpx2.AsyncClient, fleet: Fleet
) -> None:
    adapters = (AdapterBeat("a", "1" * 64), AdapterBeat("z", "2" * 64))
    fleet.note_heartbeat(msgspec.structs.replace(heartbeat("m"), worker="m", adapters=adapters), time.monotonic())

    async def names(query: str) -> list[str]:
        return [model["id"] for model in (await http.get(f"/v1/models{query}")).json()["data"]]

    assert await names("") == ["m", "org/demo", "a", "z"]
    assert await names("?limit=2") == ["a", "m"]
    assert await names("?limit=2&after_id=m") == ["org/demo", "z"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "before_id=b&after_id=a"])
async def test_page_of_models_that_there_is_not_is_refused(http: httpx2.AsyncClient, query: str) -> None:
    assert assert_error(await http.get(f"/v1/models?{query}"), 400)["param"] == query.partition("=")[0]


async def test_many_adapters_are_listed_with_their_model_by_looking_at_all_once(
    http: httpx2.AsyncClient, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = tuple(AdapterBeat(f"a{number}", "1" * 64) for number in range(20))
    beat = msgspec.structs.replace(heartbeat("base"), worker="b", adapters=adapters)
    fleet.note_heartbeat(beat, time.monotonic())
    adapters_of = Mock(side_effect=fleet.adapters)
    monkeypatch.setattr(fleet, "adapters", adapters_of)
    listed = (await http.get("/v1/models")).json()["data"]
    assert {model["id"] for model in listed if model["parent"] == "base"} == {each.name for each in adapters}
    assert adapters_of.call_count == 1


async def test_a_model_says_whether_it_reads_images(
    http: httpx2.AsyncClient, fleet: Fleet, services: RouteServices
) -> None:
    fleet.note_heartbeat(msgspec.structs.replace(heartbeat("seer"), worker="s", features=(IMAGES,)), time.monotonic())
    seer = (await http.get("/v1/models/seer")).json()
    assert seer["architecture"] == {"input_modalities": ["text", "image"]}
    off = replace(services, config=replace(services.config, max_images=0))
    async with client_of(create_app(off, NO_SERVICE, ENDPOINTS), dict(http.headers)) as client:
        assert (await client.get("/v1/models/seer")).json()["architecture"] == {"input_modalities": ["text"]}
    assert seer["capabilities"] == {"image_input": {"supported": True}}


async def test_id_of_a_request_has_the_name_that_anthropics_clients_read(services: RouteServices) -> None:
    spoken = {"anthropic-version": "2023-06-01"}
    async with client_of(create_app(services, NO_SERVICE, [*ENDPOINTS, MessagesEndpoint(BODIES)]), AUTH) as http:
        for path in ("/v1/models", "/v1/chat/completions/x"):
            answer = await http.get(path, headers=spoken)
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
            assert "request-id" not in (await http.get(path)).headers
        # Below a path of Anthropic's own, whatever the client sends.
        for headers in (spoken, {}):
            answer = await http.get("/v1/messages/batches", headers=headers)
            assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_model_with_a_slash_is_found_by_its_name(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/v1/models/org/demo")).json()["id"] == "org/demo"
    assert (await http.get("/v1/models/org%2Fdemo")).json()["id"] == "org/demo"
    assert_error(await http.get("/v1/models/nothing"), 404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/tokenize"), ("POST", "/detokenize")],
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}])
async def test_route_that_needs_a_key_refuses_callers_without_one(
    http: httpx2.AsyncClient, method: str, path: str, headers: dict[str, str]
) -> None:
    http.headers.pop("Authorization")
    answer = await http.request(method, path, headers=headers)
    assert_error(answer, 401, "invalid_api_key")
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_error_of_a_route_is_told_in_the_form_of_its_api(services: RouteServices) -> None:
    async def fail(request: Request, principal: Principal) -> Response:
        raise ApiError(404, "There is none.", code="none")

    table = [KeyRoute("GET", "/theirs", fail, ANTHROPIC), KeyRoute("GET", "/ours", fail)]
    async with client_of(create_app(services, NO_SERVICE, ENDPOINTS, table), AUTH) as client:
        theirs, ours = (await client.get("/theirs")).json(), (await client.get("/ours")).json()
    assert (theirs["type"], theirs["error"]["message"]) == ("error", "There is none.")
    assert (set(ours), ours["error"]["code"]) == ({"error"}, "none")


async def test_unknown_path_and_wrong_method_have_the_four_keys_and_say_what_to_do(
    http: httpx2.AsyncClient,
) -> None:
    message = assert_error(await http.get("/nowhere"), 404, "unknown_url")["message"]
    assert message.startswith("GET /nowhere: Not Found. Check the client's base URL: ")
    assert "GET /openapi.json" in message
    assert_error(await http.get("/v1/models/nothing/"), 404)
    answer = await http.delete("/v1/models")
    assert_error(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]
    assert_error(await http.options("/tokenize"), 405)
    for endpoint in ENDPOINTS:
        answer = await http.get(endpoint.path)
        assert assert_error(answer, 405, "method_not_allowed")["message"].endswith(" Use POST.")
        assert answer.headers["allow"] == "POST"
    refusal = assert_error(await http.post("/v1/models"), 405, "method_not_allowed")
    assert refusal["message"] == "POST /v1/models: Method Not Allowed. Use GET."


async def test_head_is_answered_like_get(http: httpx2.AsyncClient) -> None:
    assert (await http.head("/health/live")).status_code == 200


async def respond(connection: Client, model: str, reply: Callable[[Any], TokenizerReply]) -> None:
    decoder = msgspec.msgpack.Decoder(TokenizeCall | DetokenizeCall)

    async def answer(message: Msg) -> None:
        await message.respond(encode(reply(decoder.decode(message.data))))

    await connection.subscribe(tokenizer_subject(model), queue="tokenizers", cb=answer)
    await connection.flush()


async def test_tokenize_and_detokenize_ask_a_worker(http: httpx2.AsyncClient, connection: Client) -> None:
    calls: list[Any] = []

    def reply(call: TokenizeCall | DetokenizeCall) -> TokenizerReply:
        assert call.deadline is not None
        assert 0 < call.deadline - time.time() <= TOKENIZER_TIMEOUT_S
        calls.append(msgspec.structs.replace(call, deadline=None))
        if isinstance(call, DetokenizeCall):
            return TokenizerReply(text="abc")
        return TokenizerReply(token_ids=(1, 2, 3), max_model_len=512)

    await respond(connection, "org/demo", reply)
    answer = await http.post("/tokenize", json={"prompt": "abc"})
    assert answer.json() == {"count": 3, "max_model_len": 512, "tokens": [1, 2, 3], "token_strs": None}
    assert calls[-1] == TokenizeCall(text="abc")
    body = {"model": "org/demo", "messages": [{"role": "user", "content": "abc"}], "add_generation_prompt": False}
    assert (await http.post("/tokenize", json=body)).json()["count"] == 3
    assert calls[-1].messages[0].content == "abc"
    assert calls[-1].chat == ChatOptions(add_generation_prompt=False)
    assert not calls[-1].add_special_tokens
    assert (await http.post("/detokenize", json={"tokens": [1, 2, 3]})).json() == {"prompt": "abc"}


async def test_call_of_the_tokenizer_holds_a_place_no_longer_than_it_lasts(
    services: RouteServices, connection: Client
) -> None:
    await respond(connection, "org/demo", lambda call: TokenizerReply(token_ids=(1,)))
    principal = limited(concurrent=1)
    for _ in range(2):
        assert (await services.ask_tokenizer(principal, "org/demo", TokenizeCall(text="a"))).token_ids == (1,)


@pytest.mark.parametrize(
    ("on_demand", "said"), [(True, "(loading), and this call does not load it"), (False, "(loading).")]
)
async def test_model_that_its_host_has_not_loaded_yet_is_told_as_such(
    http: httpx2.AsyncClient, fleet: Fleet, on_demand: bool, said: str
) -> None:
    """No worker of it is heard any more, and it is listed all the same."""
    coming = HostedModel(name="later", path="/m", state="loading", on_demand=on_demand)
    fleet.note_host_beat(HostBeat(host="h", models=(coming,)), time.monotonic())
    error = assert_error(await http.post("/tokenize", json={"model": "later", "prompt": "x"}), 503, "no_worker")
    assert said in error["message"]


async def test_input_a_worker_refuses_is_a_400(http: httpx2.AsyncClient, connection: Client) -> None:
    await respond(connection, "org/demo", lambda call: TokenizerReply(error="token 99999 is not in the vocabulary"))
    error = assert_error(await http.post("/detokenize", json={"tokens": [99999]}), 400)
    assert "99999" in error["message"]


async def test_busy_tokenizer_is_a_503_that_says_when_to_return(http: httpx2.AsyncClient, connection: Client) -> None:
    await respond(connection, "org/demo", lambda call: TokenizerReply(error="The tokenizer is busy.", retry_after_s=7))
    answer = await http.post("/tokenize", json={"prompt": "abc"})
    assert_error(answer, 503, "tokenizer_busy")
    assert answer.headers["retry-after"] == "7"


async def test_tokenizer_calls_under_way_are_bounded_and_a_tenant_has_a_share_of_them(
    connection: Client, services: RouteServices
) -> None:
    heard: list[Msg] = []

    async def hold(message: Msg) -> None:
        heard.append(message)

    await connection.subscribe(tokenizer_subject("org/demo"), cb=hold)
    await connection.flush()
    client, call = TokenizerClient(connection, timeout_s=60), TokenizeCall(text="abc")

    def begin(tenant: str, number: int) -> list[asyncio.Task[TokenizerReply]]:
        return [asyncio.create_task(client.call("org/demo", tenant, call)) for _ in range(number)]

    async def assert_busy(tenant: str, whose: str) -> None:
        with pytest.raises(ApiError, match=whose) as refused:
            await client.call("org/demo", tenant, call)
        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "tokenizer_busy", 1.0)

    calling = begin("a", MAX_CALLS_OF_ONE)
    await until(lambda: len(heard) == MAX_CALLS_OF_ONE)
    await assert_busy("a", "of this tenant")
    for number in range(MAX_CALLS // MAX_CALLS_OF_ONE - 1):
        calling += begin(f"b{number}", MAX_CALLS_OF_ONE)
    await until(lambda: len(heard) == MAX_CALLS)
    await assert_busy("c", "of all tenants")
    # A call that is given up makes room, and so does one that is answered.
    calling.pop().cancel()
    await asyncio.sleep(0)
    calling += begin("c", 1)
    await until(lambda: len(heard) == MAX_CALLS + 1)
    for message in heard:
        await message.respond(encode(TokenizerReply(token_ids=(1,), max_model_len=512)))
    assert {reply.token_ids for reply in await asyncio.gather(*calling)} == {(1,)}
    assert not client._calls


async def test_no_worker_is_a_503_and_a_silent_worker_a_504(
    http: httpx2.AsyncClient, connection: Client, services: RouteServices
) -> None:
    answer = await http.post("/tokenize", json={"prompt": "abc"})
    assert_error(answer, 503, "no_worker")
    assert int(answer.headers["retry-after"]) >= 1

    async def ignore(message: Msg) -> None:
        pass

    await connection.subscribe(tokenizer_subject("org/demo"), cb=ignore)
    await connection.flush()
    services.tokenizer._timeout_s = 0.2
    assert_error(await http.post("/tokenize", json={"prompt": "abc"}), 504, "timeout")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": ""}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens.[0]"),
    ],
)
async def test_bad_tokenizer_body_names_the_field(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert assert_error(await http.post(path, json=body), 400)["param"] == param


async def test_model_may_be_left_out_only_where_there_is_one(http: httpx2.AsyncClient, fleet: Fleet) -> None:
    fleet.note_heartbeat(heartbeat("other"), time.monotonic())
    assert assert_error(await http.post("/tokenize", json={"prompt": "a"}), 400)["param"] == "model"


async def test_oversize_body_is_refused_before_its_rest_is_read(http: httpx2.AsyncClient) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"x" * 1024

    assert_error(await http.post("/tokenize", content=b"x" * 4097), 413, "request_too_large")
    assert_error(await http.post("/tokenize", content=in_pieces()), 413, "request_too_large")


async def test_compressed_body_other_than_gzip_is_refused(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/tokenize", content=b"x", headers={"content-encoding": "br"})
    assert_error(answer, 415, "unsupported_content_encoding")
    answer = await http.post("/tokenize", content=b"x", headers={"content-encoding": "gzip"})
    assert_error(answer, 400, "invalid_content_encoding")


async def test_ready_follows_the_workers_and_live_does_not(
    http: httpx2.AsyncClient, fleet: Fleet, services: RouteServices
) -> None:
    http.headers.pop("Authorization")
    answer = await http.get("/health/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "models": 1})
    fleet.note_heartbeat(heartbeat("org/demo", draining=True), time.monotonic())
    answer = await http.get("/health/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "no_worker", "models": 0})
    assert (await http.get("/health/live")).json() == {"status": "live"}


async def test_gateway_without_a_queue_is_not_ready(http: httpx2.AsyncClient, connection: Client) -> None:
    await connection.close()
    answer = await http.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "no_queue")


async def test_operator_routes_are_not_on_the_public_port(http: httpx2.AsyncClient) -> None:
    assert_error(await http.get("/metrics"), 404, "unknown_url")
    assert set((await http.get("/health/ready")).json()) == {"status", "models"}


def test_time_of_a_model_is_told_in_utc_wherever_the_server_stands(
    services: RouteServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = Routes(services)
    routes._created = 1_700_000_000
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert routes._model("org/demo", Principal("k", "t")).created_at == "2023-11-14T22:13:20Z"
    finally:
        time.tzset()
