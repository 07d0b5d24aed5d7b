"""Aliases and canaries through a gateway: what clients and operators see, and what workers are asked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.admission.api_keys import create_key
from shared.adapter_calls import AdapterBeat
from shared.messages import Delta, Finish, Request, TokenLogprob, Usage
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.wire_worker import WireWorker

OPERATOR_KEY = "operator-key-of-32-characters-xx"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aliases")


@pytest.fixture(scope="module")
def keys(directory: Path) -> dict[str, str]:
    file = directory / "keys.json"
    return {name: create_key(file, tenant=name, models=[name])[1] for name in ("chat", "other")}


@pytest.fixture(scope="module")
def gateway(nats_url: str, directory: Path, keys: dict[str, str]) -> Iterator[GatewayProcess]:
    settings = {"operator_port": 0, "operator_key": OPERATOR_KEY, "keys_file": directory / "keys.json"}
    with running_gateway(directory, nats_url, **settings, audit_file=directory / "audit.jsonl") as gateway:
        yield gateway


class Aliases:
    """The operator's and a client's side of a gateway, with an alias `chat` for a model of the test's own."""

    def __init__(self, gateway: GatewayProcess, stable: WireWorker, canary: WireWorker) -> None:
        found = re.search(r"operator's port .*?url=(http://\S+)", gateway.log)
        assert found is not None
        self._operator, self._url = found[1], gateway.url
        self.stable, self.canary = stable, canary
        self.client = httpx2.AsyncClient(timeout=60)

    async def order(self, path: str, body: object, key: str = OPERATOR_KEY) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return await self.client.post(f"{self._operator}/v1/{path}", headers=headers, content=json.dumps(body))

    async def done(self, path: str, **body: object) -> dict[str, Any]:
        answer = await self.order(path, body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def canaries(self) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        return list((await self.client.get(f"{self._operator}/v1/canaries", headers=headers)).json()["canaries"])

    async def ask(self, name: str, key: str = API_KEY, prompt: str = "hi", **fields: object) -> httpx2.Response:
        body = {"model": name, "prompt": prompt, "max_tokens": 4, "temperature": 1, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        return await self.client.post(f"{self._url}/v1/completions", headers=headers, json=body)

    async def names(self, key: str) -> dict[str, str]:
        answer = await self.client.get(f"{self._url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        return {model["id"]: model["root"] for model in answer.json()["data"]}

    async def until_listed(self, name: str, *, is_listed: bool = True) -> dict[str, str]:
        """Wait until a model is listed, or is not any more; return all."""
        async with asyncio.timeout(30):
            while (name in (shown := await self.names(API_KEY))) != is_listed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return shown


@pytest.fixture
async def aliases(gateway: GatewayProcess, nats_url: str) -> AsyncIterator[Aliases]:
    async with known_worker(nats_url, gateway) as stable, known_worker(nats_url, gateway) as canary:
        made = Aliases(gateway, stable, canary)
        await made.done("aliases", name="chat", model=stable.model)
        yield made
        await made.order("aliases/remove", {"name": "chat"})
        await made.client.aclose()


async def answer(worker: WireWorker, text: str, logprob: float | None = None) -> Request:
    """Answer the next request with a token, and with its log probability where it is asked for."""
    request = await worker.next_request()
    asked = request.sampling.logprobs is not None and logprob is not None
    told = (TokenLogprob(1, text, text.encode(), logprob or 0.0),) if asked else None
    await worker.claim(request)
    assert request.reply is not None
    await worker.send(request.reply, [Delta(request.id, request.epoch, 0, (1,), text, logprobs=told)])
    await worker.end(request, 1, Finish("stop", Usage(3, 1)))
    return request


async def answered(asking: Any, worker: WireWorker, text: str) -> httpx2.Response:
    asked = asyncio.create_task(asking)
    await answer(worker, text)
    return await asked


async def test_answer_shows_the_name_that_was_asked_and_a_swap_holds_for_the_next_request(aliases: Aliases) -> None:
    first = (await answered(aliases.ask("chat"), aliases.stable, "one")).json()
    assert (first["model"], first["choices"][0]["text"]) == ("chat", "one")
    running = asyncio.create_task(aliases.ask("chat"))
    claimed = await aliases.stable.begin()
    await aliases.done("aliases", name="chat", model=aliases.canary.model)
    second = (await answered(aliases.ask("chat"), aliases.canary, "two")).json()
    assert (second["model"], second["choices"][0]["text"]) == ("chat", "two")
    # What ran at the swap ends where it began.
    await aliases.stable.complete(claimed, 0, 2)
    assert (await running).json()["choices"][0]["text"] == "0 1 "


async def test_key_has_to_be_allowed_the_alias_and_not_its_model(aliases: Aliases, keys: dict[str, str]) -> None:
    told = await answered(aliases.ask("chat", keys["chat"]), aliases.stable, "yes")
    assert told.json()["choices"][0]["text"] == "yes"
    assert (await aliases.ask(aliases.stable.model, keys["chat"])).status_code == 404
    assert (await aliases.ask("chat", keys["other"])).status_code == 404
    assert await aliases.names(keys["chat"]) == {"chat": aliases.stable.model}
    assert await aliases.names(keys["other"]) == {}


async def test_alias_of_a_tenant_is_that_tenants_alone(aliases: Aliases, keys: dict[str, str]) -> None:
    await aliases.done("aliases", name="chat", model=aliases.canary.model, tenant="chat")
    assert (await answered(aliases.ask("chat", keys["chat"]), aliases.canary, "own")).status_code == 200
    assert (await answered(aliases.ask("chat"), aliases.stable, "all")).status_code == 200
    await aliases.done("aliases/remove", name="chat", tenant="chat")
    assert (await answered(aliases.ask("chat", keys["chat"]), aliases.stable, "all")).status_code == 200


async def test_worker_that_calls_an_adapter_like_an_alias_gets_none_of_its_requests(
    aliases: Aliases, gateway: GatewayProcess, nats_url: str
) -> None:
    async with known_worker(nats_url, gateway) as liar:
        own = f"own-{liar.model}"
        liar.adapters = (AdapterBeat("chat", "0" * 64), AdapterBeat(own, "0" * 64))
        shown = await aliases.until_listed(own)
        assert shown["chat"] == aliases.stable.model
        assert (await answered(aliases.ask("chat"), aliases.stable, "mine")).json()["choices"][0]["text"] == "mine"
        changed = await aliases.done("aliases", name="chat", model=aliases.canary.model)
        assert [(each["name"], each["is_hidden"]) for each in changed["aliases"]] == [("chat", False)]
        assert (await answered(aliases.ask("chat"), aliases.canary, "mine")).status_code == 200
        refused = await aliases.order("aliases", {"name": own, "model": aliases.stable.model})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
        assert liar.requests.empty()
        # The next alias `chat` is a new one.
        liar.adapters = ()
        await aliases.until_listed(own, is_listed=False)


async def test_alias_whose_model_is_not_served_any_more_says_so(aliases: Aliases) -> None:
    await aliases.done("aliases/remove", name="chat")
    gone = (await aliases.ask("chat")).json()["error"]
    assert gone["code"] == "model_not_found"
    refused = await aliases.order("aliases", {"name": "chat", "model": "gone"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_log_probabilities_are_compared_where_nobody_asks_for_them_and_stay_out_of_answers(
    aliases: Aliases,
) -> None:
    rules = {"min_requests": 20, "logprob_share": 1.0}
    await aliases.done("canaries", alias="chat", model=aliases.canary.model, percent=100, rules=rules)
    whole = asyncio.create_task(aliases.ask("chat", prompt="whole"))
    assert (await answer(aliases.canary, "a", -2.0)).sampling.logprobs == 0
    assert (await whole).json()["choices"][0]["logprobs"] is None
    streamed = asyncio.create_task(aliases.ask("chat", prompt="streamed", stream=True))
    await answer(aliases.canary, "b", -4.0)
    assert "logprob" not in (await streamed).text.replace('"logprobs":null', "")
    asked = asyncio.create_task(aliases.ask("chat", prompt="asked", logprobs=1))
    await answer(aliases.canary, "c", -3.0)
    assert (await asked).json()["choices"][0]["logprobs"]["token_logprobs"] == [-3.0]
    # Another gateway that takes a resumable stream over shows what its requests ask for: nothing is added to these.
    resumable = aliases.ask("chat", prompt="resumable", stream=True, stream_options={"resumable": True})
    kept = asyncio.create_task(resumable)
    assert (await answer(aliases.canary, "d", -9.0)).sampling.logprobs is None
    assert (await kept).status_code == 200
    (shown,) = await aliases.canaries()
    stable, canary = shown["arms"]
    assert (canary["requests"], canary["logprobs"], canary["mean_logprob"]) == (4, 3, -3.0)
    assert stable["requests"] == 0
    assert shown["verdict"] == "judged after 16 more requests"


async def test_canary_is_compared_and_rolled_back_by_itself(aliases: Aliases, directory: Path) -> None:
    rules = {"min_requests": 20}
    await aliases.done("canaries", alias="chat", model=aliases.canary.model, percent=50, rules=rules)
    statuses: list[int] = []

    async def ask(number: int) -> None:
        statuses.append((await aliases.ask("chat", prompt=f"prompt {number}", temperature=0)).status_code)

    async def fail() -> None:
        while True:
            request = await aliases.canary.next_request()
            await aliases.canary.claim(request)
            await aliases.canary.end(request, 0, Finish("failed", Usage(3, 0), error="broken weights"))

    workers = [asyncio.create_task(aliases.stable.serve()), asyncio.create_task(fail())]
    try:
        await asyncio.gather(*map(ask, range(100)))
        assert set(statuses) == {200, 500}
        async with asyncio.timeout(30):
            while (shown := (await aliases.canaries())[0])["state"] == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert shown["state"] == "rolled_back"
        assert "of the canary's answers failed, and 0.00% of the others" in shown["verdict"]
        before = statuses.count(500)
        await asyncio.gather(*map(ask, range(100)))
        assert statuses.count(500) == before
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    lines = [json.loads(line) for line in (directory / "audit.jsonl").read_text().splitlines()]
    (line,) = [each for each in lines if each["what"].get("canary") == aliases.canary.model]
    assert (line["action"], line["what"]["by"], line["outcome"]) == ("canary.rollback", "comparison", "done")


async def test_operator_promotes_and_each_change_is_in_the_audit_log(aliases: Aliases, directory: Path) -> None:
    model = aliases.canary.model
    await aliases.done("canaries", alias="chat", model=model, percent=10)
    await aliases.done("canaries/change", alias="chat", action="percent", percent=20)
    (shown,) = (await aliases.done("canaries/change", alias="chat", action="promote"))["canaries"]
    assert (shown["state"], shown["verdict"], shown["percent"]) == ("promoted", "by an operator", 20)
    assert (await answered(aliases.ask("chat"), aliases.canary, "new")).status_code == 200
    again = await aliases.order("canaries/change", {"alias": "chat", "action": "rollback"})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "canary_not_found")
    lines = [json.loads(line) for line in (directory / "audit.jsonl").read_text().splitlines()]
    done = [(each["action"], each["outcome"]) for each in lines]
    started = max(at for at, each in enumerate(lines) if each["action"] == "canary.start")
    expected = ["canary.start", "canary.percent", "canary.promote"]
    assert done[started:] == [*((each, "done") for each in expected), ("canary.rollback", "failed")]


async def test_canary_whose_worker_has_gone_gets_nothing_and_says_so(aliases: Aliases) -> None:
    await aliases.done("canaries", alias="chat", model=aliases.canary.model, percent=100)
    await aliases.canary.die()

    async def verdict() -> str:
        return str((await aliases.canaries())[0]["verdict"])

    async with asyncio.timeout(30):
        while await verdict() != "gets no requests: no worker serves it":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await answered(aliases.ask("chat"), aliases.stable, "still")).status_code == 200


BAD = [
    ("aliases", {"name": "x"}, "Missing required parameter: 'model'"),
    ("aliases", {"name": "x" * 129, "model": "m"}, "'name' is invalid: expected string of length <= 128"),
    ("canaries", {"alias": "chat", "model": "m", "percent": 0}, "'percent' is invalid: expected number > 0"),
    ("canaries", {"alias": "chat", "model": "m", "percent": 101}, "'percent' is invalid: expected number <= 100"),
    (
        "canaries",
        {"alias": "chat", "model": "m", "percent": 1, "rules": {"max_ttft": 2}},
        "Unknown parameter: 'rules.max_ttft'",
    ),
    (
        "canaries",
        {"alias": "chat", "model": "m", "percent": 1, "rules": {"min_requests": 1}},
        "'rules.min_requests' is invalid: expected integer >= 20",
    ),
    ("canaries/change", {"alias": "chat", "action": "stop"}, "'action' must be one of promote, rollback, percent"),
    ("canaries/change", {"alias": "chat", "action": "percent"}, "'percent' goes with the action"),
    ("aliases/remove", [], "The body is invalid"),
]


@pytest.mark.parametrize(("path", "body", "told"), BAD)
async def test_wrong_body_is_told_by_field_and_limit(
    gateway: GatewayProcess, path: str, body: object, told: str
) -> None:
    found = re.search(r"operator's port .*?url=(http://\S+)", gateway.log)
    assert found is not None
    url = f"{found[1]}/v1/{path}"
    async with httpx2.AsyncClient() as client:
        refused = await client.post(url, headers={"Authorization": f"Bearer {OPERATOR_KEY}"}, json=body)
        assert refused.status_code == 400, refused.text
        assert told in refused.json()["error"]["message"]
        assert (await client.post(url, json=body)).status_code == 401
        assert (await client.post(url, headers={"Authorization": f"Bearer {API_KEY}"}, json=body)).status_code == 401
