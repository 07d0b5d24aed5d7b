"""Images over HTTP: what a worker gets of them, and what clients are told where no worker sees."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest
from nats.aio.msg import Msg

from shared.media import IMAGE_NOT_FOUND, IMAGES_BUSY
from shared.media_store import MediaStore
from shared.messages import Finish, Usage, encode
from shared.streams import MEDIA_STREAM
from shared.subjects import media_subject, tokenizer_subject
from shared.tokenizer_calls import TokenizeCall, TokenizerReply
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.known_worker import known_worker
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import WireWorker, expected_text
from tests.images import encoded, picture, reference
from tests.waiting import until

__all__ = ["gateway", "nats_url"]

PNG = encoded(picture())
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
CHAT = {
    "role": "user",
    "content": [{"type": "text", "text": "See: "}, {"type": "image_url", "image_url": {"url": URL}}],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [CHAT], "max_tokens": 3},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}],
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": DATA}}]}],
        "max_tokens": 3,
    },
}
PLACES = {
    "/v1/chat/completions": "messages.[0].content.[1].image_url",
    "/v1/responses": "input.[0].content.[0].image_url",
    "/v1/messages": "messages.[0].content.[0].source.data",
}


@pytest.fixture
async def worker(gateway: GatewayProcess, nats_url: str) -> AsyncIterator[WireWorker]:
    """The one worker of the gateway, which sees."""
    async with known_worker(nats_url, gateway) as worker:
        worker.sees = True
        async with httpx2.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {API_KEY}"}) as http:

            async def sees() -> bool:
                model = (await http.get(f"/v1/models/{worker.model}")).json()
                return "image" in model["architecture"]["input_modalities"]

            await worker.nats.subscribe(tokenizer_subject(worker.model), cb=answer)
            async with asyncio.timeout(20):
                while not await sees():  # noqa: ASYNC110 - heartbeats tell it
                    await asyncio.sleep(0.02)
        yield worker


async def answer(message: Msg) -> None:
    await message.respond(encode(TokenizerReply(token_ids=(1, 2, 3), max_model_len=100)))


async def post(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=20, trust_env=False) as http:
        return await http.post(path, json=body, headers={"authorization": f"Bearer {API_KEY}"})


async def failed(
    gateway: GatewayProcess, worker: WireWorker, path: str, body: dict[str, Any], **error: str
) -> httpx2.Response:
    """Return the answer to a request that the worker says it failed at."""
    asking = asyncio.create_task(post(gateway, path, {"model": worker.model, **body}))
    await worker.end(await worker.next_request(), 0, Finish("failed", **error))
    return await asking


@pytest.mark.parametrize("path", BODIES)
async def test_worker_gets_images_by_digest_and_reads_them_from_the_store(
    gateway: GatewayProcess, worker: WireWorker, path: str
) -> None:
    asking = asyncio.create_task(post(gateway, path, {"model": worker.model, **BODIES[path]}))
    request = await worker.next_request()
    assert request.media == (reference(PNG),)
    assert request.messages is not None
    assert request.messages[-1].texts_and_images[-1] == 0
    assert await MediaStore(worker.nats.jetstream()).get(request.tenant, request.media[0]) == PNG
    await worker.claim(request, prompt_tokens=77)
    await worker.say(request, 0, 3)
    await worker.end(request, 3, Finish("length", Usage(77, 3)))
    reply = (await asking).json()
    usage = reply["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == 77


async def test_model_that_reads_text_refuses_images_with_their_place(gateway: GatewayProcess, nats_url: str) -> None:
    async with known_worker(nats_url, gateway) as blind:
        for path, where in PLACES.items():
            refused = await post(gateway, path, {"model": blind.model, **BODIES[path]})
            assert refused.status_code == 400
            assert f"'{where}' is an image, and the model `{blind.model}` reads text alone." in refused.text
        counted = await post(gateway, "/tokenize", {"model": blind.model, "messages": [CHAT]})
        assert (counted.status_code, counted.json()["error"]["param"]) == (400, "messages.[0].content.[1].image_url")


async def test_images_wait_while_a_worker_of_an_earlier_version_runs(
    gateway: GatewayProcess, worker: WireWorker, nats_url: str
) -> None:
    async with WireWorker(nats_url, worker.model, f"old-{worker.model}"):
        body = {"model": worker.model, **BODIES["/v1/chat/completions"]}
        replies: list[httpx2.Response] = []

        async def refused() -> bool:
            replies.append(await post(gateway, "/tokenize", {"model": worker.model, "messages": [CHAT]}))
            return replies[-1].status_code == 503

        async with asyncio.timeout(20):
            while not await refused():
                pass
        waits = await post(gateway, "/v1/chat/completions", body)
        assert (waits.status_code, waits.json()["error"]["code"]) == (503, "no_worker")
        assert "retry-after" in waits.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [CHAT]}),
        ("/v1/messages/count_tokens", {"messages": BODIES["/v1/messages"]["messages"]}),
        ("/v1/responses/input_tokens", {"input": BODIES["/v1/responses"]["input"]}),
    ],
)
async def test_tokens_are_counted_with_images(
    gateway: GatewayProcess, worker: WireWorker, path: str, body: dict[str, Any]
) -> None:
    calls: list[TokenizeCall] = []

    async def hear(message: Msg) -> None:
        calls.append(msgspec.msgpack.decode(message.data, type=TokenizeCall))

    await worker.nats.subscribe(tokenizer_subject(worker.model), cb=hear)
    reply = await post(gateway, path, {"model": worker.model, **body})
    assert reply.status_code == 200, reply.text
    await until(lambda: calls)
    assert [ref.digest for ref in calls[0].media] == [hashlib.sha256(PNG).digest()]


async def test_photo_of_any_size_that_is_read_may_be_in_the_body(gateway: GatewayProcess, worker: WireWorker) -> None:
    photo = PNG + bytes((20 << 20) - len(PNG))
    url = f"data:image/png;base64,{base64.b64encode(photo).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": worker.model, "messages": [{"role": "user", "content": content}]}
    asking = asyncio.create_task(post(gateway, "/v1/chat/completions", body))
    request = await worker.next_request()
    assert request.media[0].num_bytes == 20 << 20
    await worker.complete(request, 0, 2)
    assert (await asking).status_code == 200


async def test_client_is_told_when_to_send_an_image_again_that_takes_long(
    gateway: GatewayProcess, worker: WireWorker
) -> None:
    path = "/v1/chat/completions"
    reply = await failed(gateway, worker, path, BODIES[path], error="Many images wait.", error_code=IMAGES_BUSY)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert reply.json()["error"]["message"] == "Many images wait."


async def test_image_that_a_worker_did_not_find_is_stored_when_it_is_sent_again(
    gateway: GatewayProcess, worker: WireWorker
) -> None:
    path = "/v1/chat/completions"
    js, body = worker.nats.jetstream(), {"model": worker.model, **BODIES[path]}
    asking = asyncio.create_task(post(gateway, path, body))
    request = await worker.next_request()
    await js.purge_stream(MEDIA_STREAM, subject=media_subject(request.tenant, request.media[0].digest, "*"))
    lost = Finish("failed", error="It is lost.", error_param="media", error_code=IMAGE_NOT_FOUND)
    await worker.end(request, 0, lost)
    reply = await asking
    # SDKs send it again by themselves.
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == IMAGE_NOT_FOUND
    asking = asyncio.create_task(post(gateway, path, body))
    request = await worker.next_request()
    assert await MediaStore(js).get(request.tenant, request.media[0]) == PNG
    await worker.complete(request, 0, 2)
    assert (await asking).status_code == 200


@pytest.mark.parametrize(("path", "where"), PLACES.items())
@pytest.mark.parametrize("param", ["media.[0]", "media"])
async def test_image_that_a_worker_cannot_read_is_named_by_its_place(
    gateway: GatewayProcess, worker: WireWorker, path: str, where: str, param: str
) -> None:
    """`media` alone is what workers of earlier versions say."""
    broken = {"error": "The image is broken.", "error_param": param, "error_code": "invalid_image"}
    reply = await failed(gateway, worker, path, BODIES[path], **broken)
    assert (reply.status_code, reply.json()["error"].get("message")) == (400, "The image is broken.")
    # Anthropic's form of an error names no field.
    assert reply.json()["error"].get("param", where) == where


async def test_second_image_of_two_is_named(gateway: GatewayProcess, worker: WireWorker) -> None:
    body = {"messages": [CHAT, CHAT], "stream": True}
    broken = {"error": "Image 2 of 2 is broken.", "error_param": "media.[1]", "error_code": "invalid_image"}
    reply = await failed(gateway, worker, "/v1/chat/completions", body, **broken)
    assert '"param":"messages.[1].content.[1].image_url"' in reply.text


async def test_same_words_about_another_image_are_another_answer(gateway: GatewayProcess, worker: WireWorker) -> None:
    """A deterministic answer is repeated for the same image alone."""

    def body(seed: int) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(encoded(picture(seed=seed))).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return {"model": worker.model, "messages": [{"role": "user", "content": content}], "temperature": 0}

    digests = set()
    for seed in (1, 2):
        asking = asyncio.create_task(post(gateway, "/v1/chat/completions", body(seed)))
        request = await worker.next_request()
        digests.add(request.media[0].digest)
        await worker.complete(request, 0, 2)
        assert (await asking).json()["choices"][0]["message"]["content"] == expected_text(2)
    assert len(digests) == 2
    assert (await post(gateway, "/v1/chat/completions", body(1))).status_code == 200
