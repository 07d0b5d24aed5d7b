"""The operator's port: every route behind the operator's key, and no start without a key by oversight."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import StreamConfig, StreamInfo, StreamState

from gateway.api import adapter_orders
from gateway.api.adapter_orders import AdapterOrders
from gateway.api.operator_app import OperatorRoute, OperatorServices, create_operator_app
from gateway.config import GatewayConfig
from gateway.console.routes import ConsoleRoutes, ConsoleServices
from gateway.fleet.adapter_names import AdapterNameFollower
from gateway.fleet.fleet import Fleet, FleetLimits
from gateway.fleet.fleet_load import OwnRequests
from gateway.metrics import GatewayMetrics, MetricsCollector, make_registry
from gateway.process.settings_check import check_operator_settings
from shared.adapter_calls import AdapterBeat, AdapterOrder, AdapterReply, NamesRead, pack_residents
from shared.adapter_files import AdapterContent, AdapterFilesError
from shared.adapter_store import AdapterStoreError
from shared.errors import ConfigError
from shared.features import ADAPTER_STORE, FEATURES
from shared.messages import GatewayHeartbeat, Heartbeat, encode
from shared.subjects import adapter_subject
from tests.gateway.api.test_app import assert_error, client_of, heartbeat
from tests.gateway.fleet.test_worker_needs import needs_of

KEY = "operator-key-of-32-characters-xx"
ADAPTING = (*FEATURES, ADAPTER_STORE)
DIGESTS = {"/a": "a" * 64, "/broken": "b" * 64, "/deadly": "d" * 64, "/unlucky": "e" * 64}
PATHS = ("/health/live", "/health/ready", "/metrics", "/v1/scaling")


@dataclass
class Reply:
    subject: str
    data: bytes
    headers: None = None


@dataclass(eq=False)
class Queue:
    is_connected: bool = True
    asked: list[tuple[str, AdapterOrder]] = field(default_factory=list)

    names: Names = field(default_factory=lambda: Names())

    def jetstream(self) -> None:
        return None

    answers: dict[str, Any] = field(default_factory=dict)

    def new_inbox(self) -> str:
        return f"_INBOX.{len(self.asked)}"

    async def subscribe(self, subject: str, cb: Any) -> None:
        self.answers[subject] = cb

    async def publish(self, subject: str, payload: bytes, reply: str) -> None:
        """Answer orders as workers would; there is one adapter that they refuse, and one that kills them."""
        order = msgspec.msgpack.decode(payload, type=AdapterOrder)
        self.asked.append((subject, order))
        if order.digest == DIGESTS["/deadly"]:
            raise NatsTimeoutError
        problem = "it is broken" if order.digest == DIGESTS["/broken"] else None
        problem = "its disk is full" if order.digest == DIGESTS["/unlucky"] else problem
        answer = AdapterReply(problem, is_fault=order.digest == DIGESTS["/unlucky"])
        await self.answers[f"{reply.rpartition('.')[0]}.*"](Reply(reply, encode(answer)))


@dataclass
class Names:
    """What names mean, by tenants."""

    meaning: dict[tuple[str | None, str], AdapterContent | None] = field(default_factory=dict)

    async def put(
        self, name: str, tenant: str | None, base: str, content: AdapterContent | None, *, is_known: bool
    ) -> bool:
        before, self.meaning[tenant, name] = self.meaning.get((tenant, name)), content
        return before != content or is_known


class Store:
    """Has what `DIGESTS` says, and goes away for one directory."""

    place = "the store"

    async def put(self, directory: Path) -> AdapterContent:
        if str(directory) == "/away":
            raise AdapterStoreError("the store of adapters cannot be used: it is away")
        if str(directory) not in DIGESTS:
            raise AdapterFilesError("adapter_config.json is missing")
        return AdapterContent(DIGESTS[str(directory)], 8)

    async def num_bytes(self, digest: str) -> int | None:
        return 8 if digest in DIGESTS.values() else None

    keep = num_bytes


async def read_nothing() -> None:
    """There are no names in NATS."""


def client(
    key: str | None,
    metrics: GatewayMetrics | None = None,
    *,
    shown: str | None = None,
    queue: Queue | None = None,
    others: tuple[Heartbeat, ...] = (),
    more: Sequence[OperatorRoute] = (),
    fleet: Fleet | None = None,
    read_names: Callable[[], Awaitable[None]] = read_nothing,
) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
    fleet = fleet or Fleet("g", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
    fleet.named_adapters.read_at = math.inf
    for beat in (heartbeat("org/demo", worker="w", features=ADAPTING), *others):
        fleet.note_heartbeat(beat, time.monotonic())
    metrics, queue, needs = metrics or GatewayMetrics(), queue or Queue(), needs_of(fleet)
    needs.look(0.0)
    registry = make_registry(MetricsCollector(metrics, 0))
    adapters = AdapterOrders(queue, fleet, Store(), read_names)
    adapters._names = queue.names
    services = OperatorServices(key, fleet, queue, None, metrics, registry, needs, adapters, more)
    return client_of(create_operator_app(services), {"Authorization": f"Bearer {shown}"} if shown else {})


async def test_operator_with_the_key_sees_detail_and_metrics() -> None:
    metrics = GatewayMetrics()
    metrics.prompt_tokens += 7
    async with client(KEY, metrics, shown=KEY) as http:
        answer = await http.get("/health/ready")
        assert answer.status_code == 200
        assert answer.json()["models"]["org/demo"]["total_blocks"] == 10
        assert answer.json() | {"models": {}} == {"status": "ready", "nats": "connected", "redis": "none", "models": {}}
        assert (await http.get("/health/live")).json() == {"status": "live"}
        text = (await http.get("/metrics")).text
    assert 'headrace_prompt_tokens_total{process="0"} 7.0' in text
    assert 'headrace_requests_total{process="0",route="operator:/health/live",status="200"} 1.0' in text


async def test_need_for_workers_is_told_of_all_models_and_of_one() -> None:
    async with client(KEY, shown=KEY) as http:
        needs = (await http.get("/v1/scaling")).json()["models"]
        assert (await http.get("/v1/scaling/org/demo")).json() == needs["org/demo"]
        assert_error(await http.get("/v1/scaling/other"), 404, "model_not_found")
    assert needs["org/demo"] == {
        "workers": 1,
        "needed": 1,
        "lanes": {"interactive": 1, "batch": 0},
        "busy": 0.0,
        "predicted_wait_s": 0.0,
        "target_wait_s": 5.0,
    }


async def test_console_with_a_slash_leads_to_the_console() -> None:
    unused: Any = None
    routes = ConsoleRoutes(ConsoleServices(*[unused] * 6)).routes()
    async with client(KEY, more=routes) as http:
        answer = await http.get("/console/")
        assert answer.status_code == 308
        page = await http.get(str(answer.url.join(answer.headers["location"])))
    assert (page.url.path, page.status_code) == ("/console", 200)
    assert page.headers["content-type"].startswith("text/html")


async def test_path_of_the_public_port_is_told_what_this_one_has() -> None:
    async with client(KEY, shown=KEY) as http:
        message = assert_error(await http.get("/v1/models"), 404, "unknown_url")["message"]
        assert_error(await http.post("/metrics"), 405)
    assert all(path in message for path in PATHS)
    assert "public port" in message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shown", [None, "wrong", KEY[:-1], KEY + "x", "schlüssel", "a b"])
async def test_wrong_or_missing_key_is_a_401_on_every_route(path: str, shown: str | None) -> None:
    async with client(KEY) as http:
        headers: Any = {} if shown is None else {"Authorization": f"Bearer {shown}".encode()}
        refusal = await http.get(path, headers=headers)
    assert_error(refusal, 401, "invalid_api_key")
    assert "operator" in refusal.json()["error"]["message"]


@pytest.mark.parametrize("headers", [[("Authorization", f"Basic {KEY}")], [("Authorization", f"Bearer {KEY}")] * 2])
async def test_key_shown_in_another_way_is_a_401(headers: list[tuple[str, str]]) -> None:
    async with client(KEY) as http:
        assert_error(await http.get("/metrics", headers=headers), 401)


async def test_refused_key_is_logged_once_a_minute_without_the_key(caplog: pytest.LogCaptureFixture) -> None:
    async with client(KEY, shown="wrong-key") as http:
        for _ in range(20):
            await http.get("/metrics")
    assert caplog.text.count("refused at the operator's port") == 1
    assert "wrong-key" not in caplog.text


async def test_port_that_was_chosen_to_have_no_key_lets_everyone_in() -> None:
    async with client(None) as http:
        assert [(await http.get(path)).status_code for path in PATHS] == [200, 200, 200, 200]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header",
    [("Host", "evil.example:8001"), ("Host", "127.0.0.1.evil.example"), ("Host", "10.0.0.1"), ("Host", ""),
     ("Origin", "https://evil.example"), ("Origin", "null"), ("Origin", "http://localhost:3000")],
)  # fmt: skip
async def test_port_without_a_key_refuses_web_pages(path: str, header: tuple[str, str]) -> None:
    async with client(None) as http:
        refusal = await http.get(path, headers=[header])
    message = assert_error(refusal, 403, "forbidden")["message"]
    assert "`localhost` or a loopback address" in message
    assert "HEADRACE_OPERATOR_KEY" in message


@pytest.mark.parametrize("host", ["localhost:8001", "127.0.0.1", "127.9.9.9:1", "[::1]:8001", "LOCALHOST"])
async def test_port_without_a_key_answers_this_machine(host: str) -> None:
    async with client(None) as http:
        assert (await http.get("/metrics", headers={"Host": host})).status_code == 200


async def test_port_with_a_key_answers_whatever_name_it_is_called_by() -> None:
    async with client(KEY, shown=KEY) as http:
        assert (await http.get("/metrics", headers={"Host": "gateway:8001"})).status_code == 200


@pytest.mark.parametrize(
    ("settings", "variable"),
    [
        ({}, "HEADRACE_OPERATOR_KEY"),
        ({"operator_key": ""}, "HEADRACE_OPERATOR_KEY"),
        ({"operator_key": "short"}, "HEADRACE_OPERATOR_KEY"),
        ({"operator_without_key": True, "operator_host": "0.0.0.0"}, "HEADRACE_OPERATOR_WITHOUT_KEY"),
        ({"operator_without_key": True, "operator_host": "example.org"}, "HEADRACE_OPERATOR_WITHOUT_KEY"),
        ({"operator_without_key": True, "operator_key": KEY}, "HEADRACE_OPERATOR_WITHOUT_KEY"),
    ],
)
def test_port_without_a_key_is_refused_unless_chosen_on_loopback(settings: dict[str, Any], variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        check_operator_settings(GatewayConfig(operator_port=0, **settings))
    check_operator_settings(GatewayConfig(**settings))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_may_be_chosen_to_have_no_key(host: str) -> None:
    check_operator_settings(GatewayConfig(operator_port=0, operator_without_key=True, operator_host=host))


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("load", {"lora_name": "a", "lora_path": "/a"}, 200, "'a' added successfully"),
        (
            "load",
            {"lora_name": "a", "lora_path": "/a", "base_model_name": "org/demo", "load_inplace": True},
            200,
            "added",
        ),
        ("load", {"lora_name": "a", "lora_content": ["a" * 64, 8]}, 200, "added"),
        ("load", {"lora_name": "a", "lora_content": ["9" * 64, 8]}, 400, "the store does not have 999999999999"),
        ("unload", {"lora_name": "a"}, 404, "there is no adapter 'a'"),
        ("load", {"lora_name": "a b", "lora_path": "/a"}, 400, "must not contain white space"),
        ("load", {"lora_name": "a", "lora_path": "/broken"}, 400, "The worker w could not load it: it is broken"),
        ("load", {"lora_name": "a", "lora_path": "/deadly"}, 503, "it does not answer (TimeoutError)"),
        ("load", {"lora_name": "a", "lora_path": "/unlucky"}, 503, "could not load it: its disk is full"),
        ("load", {"lora_name": "a", "lora_path": "/none"}, 400, "adapter_config.json is missing"),
        ("load", {"lora_name": "a", "lora_path": "/away"}, 503, "it is away"),
        ("load", {"lora_name": "a"}, 400, "lora_path"),
        ("load", {"lora_name": "f" * 64, "lora_path": "/a"}, 400, "may not read as a digest does"),
        ("load", {"lora_name": "org/demo", "lora_path": "/a"}, 400, "is the name of a model"),
        ("load", {"lora_name": "a", "lora_path": "/a", "other": 1}, 400, "other"),
        ("load", {"lora_name": "a", "lora_path": "/a", "base_model_name": "no"}, 404, "no worker serves this model"),
        ("unload", {"lora_name": "a" * 129}, 400, "128"),
    ],
)
async def test_adapters_are_loaded_by_the_operator_alone(
    path: str, body: dict[str, object], status: int, said: str
) -> None:
    url = f"/v1/{path}_lora_adapter"
    async with client(KEY, shown=KEY) as http:
        answer = await http.post(url, json=body)
    async with client(KEY, shown="another-key") as http:
        assert (await http.post(url, json=body)).status_code == 401
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


async def test_adapter_is_checked_by_a_worker_of_the_model_that_is_named_before_its_name_means_it() -> None:
    queue, other = Queue(), heartbeat("org/other", worker="x", features=ADAPTING)
    body = {"lora_name": "a", "lora_path": "/a", "tenant": "acme"}
    async with client(KEY, shown=KEY, queue=queue, others=(other,)) as http:
        unnamed = await http.post("/v1/load_lora_adapter", json=body)
        assert assert_error(unnamed, 400)["param"] == "base_model_name"
        assert "org/demo, org/other" in unnamed.text
        named = await http.post("/v1/load_lora_adapter", json=body | {"base_model_name": "org/other"})
        assert named.status_code == 200
        assert queue.asked == [(adapter_subject("x"), AdapterOrder("a", digest="a" * 64))]
        broken = {**body, "base_model_name": "org/other", "lora_path": "/broken"}
        assert_error(await http.post("/v1/load_lora_adapter", json=broken), 400, code="adapter_refused")
        # What is refused leaves the name as it was, and a name is its tenant's alone.
        assert queue.names.meaning == {("acme", "a"): AdapterContent("a" * 64, 8)}
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})).status_code == 404
        removed = await http.post("/v1/unload_lora_adapter", json={"lora_name": "a", "tenant": "acme"})
    assert removed.status_code == 200
    assert queue.names.meaning["acme", "a"] is None


async def test_what_workers_have_named_is_listed_and_removed_for_all() -> None:
    digest, queue = "a" * 64, Queue()
    adapting = {"features": ADAPTING, "adapters": (AdapterBeat("own", digest),)}
    having = heartbeat("org/demo", worker="w", resident_adapters=pack_residents(["b" * 64, digest]), **adapting)
    other = heartbeat("org/demo", worker="x", resident_adapters=pack_residents(["b" * 64]), **adapting)
    async with client(KEY, shown=KEY, queue=queue, others=(having, other)) as http:
        listed = (await http.get("/v1/adapters")).json()
        theirs = await http.post("/v1/unload_lora_adapter", json={"lora_name": "own", "tenant": "acme"})
        removed = await http.post("/v1/unload_lora_adapter", json={"lora_name": "own"})
    told = {"name": "own", "tenant": None, "base": "org/demo", "digest": digest, "workers": ["w"]}
    assert listed == {"adapters": [told | {"rank": None, "bytes": None}]}
    assert "no adapter 'own' of the tenant 'acme'" in assert_error(theirs, 404)["message"]
    assert (removed.status_code, queue.names.meaning[None, "own"]) == (200, None)


async def test_adapter_waits_until_all_workers_of_its_model_have_places() -> None:
    queue, earlier = Queue(), heartbeat("org/demo", worker="x", features=FEATURES)
    async with client(KEY, shown=KEY, queue=queue, others=(earlier,)) as http:
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
    assert "--max-loras and --adapters" in assert_error(answer, 400, code="no_adapter_places")["message"]
    assert not queue.asked


async def test_a_name_is_changed_although_the_heartbeat_that_tells_it_cannot_be_sent() -> None:
    fleet = Fleet("g", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
    told: list[NamesRead | None] = []

    class Stream:
        async def stream_info(self, name: str) -> StreamInfo:
            state = StreamState(0, 0, 0, 0, 0)
            return StreamInfo(StreamConfig(), state, created=datetime.fromtimestamp(5.0, UTC))

    async def tell() -> None:
        told.append(fleet.named_adapters.read)
        raise NatsTimeoutError

    nats: Any = SimpleNamespace(jetstream=Stream)
    follower = AdapterNameFollower(nats, fleet.named_adapters, tell)
    async with client(KEY, shown=KEY, fleet=fleet, read_names=follower.read) as http:
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
    assert (answer.status_code, told) == (200, [NamesRead(5.0, 0)])


async def test_swap_waits_for_all_gateways_and_names_the_one_that_does_not_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, read = Fleet("g", FleetLimits(), OwnRequests(lambda model: (0, 0), dict)), NamesRead(5.0, 7)
    fleet.named_adapters.read = read

    def hear(gateway: str, told: NamesRead | None) -> None:
        beat = GatewayHeartbeat(gateway=gateway, unclaimed=0, unclaimed_tokens=0, adapter_names=told)
        fleet.note_gateway_heartbeat(beat, time.monotonic())

    body = {"lora_name": "a", "lora_path": "/a"}
    async with client(KEY, shown=KEY, fleet=fleet) as http:
        # One has not read so far, and one has read that of another stream.
        hear("slow", NamesRead(5.0, 6))
        hear("quick", NamesRead(4.0, 9))
        adding = asyncio.create_task(http.post("/v1/load_lora_adapter", json=body))
        hear("quick", read)
        await asyncio.sleep(0.1)
        assert not adding.done()
        hear("slow", NamesRead(5.0, 8))
        assert (await adding).status_code == 200
        monkeypatch.setattr(adapter_orders, "LEASE_S", 0.05)
        hear("slow", NamesRead(5.0, 6))
        late = await http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert late.status_code == 200
        assert "get a 503 from gateways that cannot read names: slow." in late.text
        # Of an earlier version: it does not tell, and has read the names anew when it is not waited for any more.
        monkeypatch.setattr(adapter_orders, "REVIEW_S", 0.0)
        monkeypatch.setattr(adapter_orders, "HEARTBEAT_INTERVAL_S", 0.0)
        hear("slow", None)
        assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
