"""Batches through OpenAI's own client, against a gateway process, with a worker of the batch lane that echoes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai.types import Batch, Completion, CreateEmbeddingResponse
from openai.types.responses import Response

from gateway.admission.api_keys import list_keys
from gateway.batches.drivers import MAX_OF_TENANT
from shared.batch_streams import batch_stream
from shared.kept_results import KeptResults
from shared.messages import BatchResult, Request
from shared.result_shares import ResultShares
from shared.server_clock import ServerClock
from tests.gateway.batches.conftest import EchoWorker, Place, echo, echo_worker
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.waiting import until

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
MOMENTS = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)


def line(number: int, model: str, text: str | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text or f"text {number}"}], "max_tokens": 8}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body} | fields


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def submitted(client: openai.AsyncOpenAI, data: bytes, **fields: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields  # type: ignore[arg-type]
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch, timeout_s: float = 30.0) -> Batch:
    async with asyncio.timeout(timeout_s):
        while batch.status not in ENDED:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def test_batch_is_computed_and_each_line_answered_once(client: openai.AsyncOpenAI, worker: EchoWorker) -> None:
    data = jsonl([line(number, worker.model) for number in range(64)])
    batch = await submitted(client, data, metadata={"of": "me"})
    assert (batch.object, batch.status, batch.endpoint, batch.metadata) == ("batch", "validating", CHAT, {"of": "me"})
    batch = await ended(client, batch)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (64, 64, 0)
    assert batch.error_file_id is None
    assert [name for name in MOMENTS if getattr(batch, name)] == ["in_progress_at", "finalizing_at", "completed_at"]
    output = await lines_of(client, batch.output_file_id)
    told = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in output}
    assert len(output) == 64
    assert told == {f"line-{number}": f"text {number}" for number in range(64)}
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (64 * 3, 64 * 4)
    assert len(worker.computed) == len(set(worker.computed)) == 64


async def test_jobs_of_lines_are_served_by_the_weight_of_their_key(
    client: openai.AsyncOpenAI, place: Place, tenant: str, worker: EchoWorker
) -> None:
    asked: list[tuple[str, float]] = []

    def answer(request: Request) -> BatchResult:
        asked.append((request.key, request.weight))
        return echo(request)

    worker.answer = answer
    batch = await ended(client, await submitted(client, jsonl([line(0, worker.model), line(1, worker.model)])))
    assert batch.status == "completed"
    (record,) = [each for each in list_keys(place.directory / "keys.json") if each.tenant == tenant]
    assert asked == [(record.id, 0.5)] * 2


async def test_lines_of_every_endpoint_are_answered_as_it_answers(
    client: openai.AsyncOpenAI, worker: EchoWorker
) -> None:
    bodies = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi", "instructions": "be brief"},
        "/v1/embeddings": {"input": ["hi", "there"]},
    }
    for endpoint, body in bodies.items():
        one = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": worker.model, **body}}
        batch = await ended(client, await submitted(client, jsonl([one]), endpoint=endpoint))
        (output,) = await lines_of(client, batch.output_file_id)
        answer = output["response"]["body"]
        if endpoint == "/v1/completions":
            assert Completion.model_validate(answer).choices[0].text == "hi"
        elif endpoint == "/v1/responses":
            response = Response.model_validate(answer)
            assert (response.output_text, response.status, response.instructions) == ("hi", "completed", "be brief")
            assert not answer["store"]
        else:
            vectors = CreateEmbeddingResponse.model_validate(answer)
            assert [each.embedding for each in vectors.data] == [[1.0], [1.0]]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
async def test_reasoning_of_all_lines_is_in_the_usage(
    client: openai.AsyncOpenAI, worker: EchoWorker, endpoint: str
) -> None:
    def answer(request: Request) -> BatchResult:
        return msgspec.structs.replace(
            echo(request), text="hmhm</think>", in_reasoning=True, chat_format="hermes-thinking"
        )

    worker.answer = answer
    body = {"model": worker.model, "input": "hi"} if endpoint == "/v1/responses" else line(0, worker.model)["body"]
    lines = [line(number, worker.model, url=endpoint, body=body) for number in range(3)]
    batch = await ended(client, await submitted(client, jsonl(lines), endpoint=endpoint))
    details = [
        each["response"]["body"]["usage"].get("completion_tokens_details")
        or each["response"]["body"]["usage"]["output_tokens_details"]
        for each in await lines_of(client, batch.output_file_id)
    ]
    # Four characters of twelve, written by four tokens.
    assert [each["reasoning_tokens"] for each in details] == [1, 1, 1]
    assert batch.usage is not None
    assert batch.usage.output_tokens_details.reasoning_tokens == 3


async def test_failed_lines_are_in_the_error_file_as_the_endpoint_tells_them(
    client: openai.AsyncOpenAI, worker: EchoWorker
) -> None:
    def answer(request: Request) -> BatchResult:
        told = echo(request)
        return msgspec.structs.replace(told, finish="failed", error="bad") if told.text == "text 1" else told

    worker.answer = answer
    batch = await ended(client, await submitted(client, jsonl([line(each, worker.model) for each in range(3)])))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1)
    (failed,) = await lines_of(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("line-1", 400)
    assert failed["response"]["body"]["error"]["message"] == "bad"
    assert len(await lines_of(client, batch.output_file_id)) == 2


def bad_lines(model: str) -> list[tuple[bytes, str, str | None]]:
    """Return lines, each with the code and the parameter of what is wrong with it."""
    good = line(0, model)
    body = good["body"]

    def of(**fields: Any) -> bytes:
        return json.dumps(good | {"custom_id": f"of-{len(found)}"} | fields).encode()

    found: list[tuple[bytes, str, str | None]] = []
    for data, code, param in (
        (lambda: b"{", "invalid_json_line", None),
        (lambda: b"[1]", "invalid_json_line", None),
        (lambda: b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (lambda: of().replace(b"text", b"te\0xt"), "invalid_json_line", None),
        (lambda: b"[" * 100_000, "invalid_json_line", None),
        (lambda: of(url="/v1/embeddings"), "invalid_url", "url"),
        (lambda: of(url="\ud800"), "invalid_url", "url"),
        (lambda: of(**{"\ud800": 1}), "unknown_parameter", "\ufffd"),
        (lambda: of(url=None), "missing_required_parameter", "url"),
        (lambda: of(method="GET"), "invalid_method", "method"),
        (lambda: of(custom_id=7), "invalid_custom_id", "custom_id"),
        (lambda: of(custom_id="x" * 300), "invalid_custom_id", "custom_id"),
        (lambda: of(body=[]), "invalid_request", "body"),
        (lambda: of(extra=1), "unknown_parameter", "extra"),
        (lambda: of(body=body | {"max_tokens": "x"}), "invalid_value", "body.max_tokens"),
        (lambda: of(body=body | {"stream": True}), "unsupported_parameter", "body.stream"),
        (lambda: of(body=body | {"priority": 5}), "invalid_value", "body.priority"),
        (lambda: of(body=body | {"model": ""}), "invalid_value", "body.model"),
        (lambda: of(custom_id="line-0"), "duplicate_custom_id", "custom_id"),
        (lambda: b'{"a": "' + b"x" * (10 << 20) + b'"}', "line_too_long", None),
    ):
        found.append((data(), code, param))
    return found


async def test_every_invalid_line_is_told_with_its_number_and_nothing_is_computed(
    client: openai.AsyncOpenAI, worker: EchoWorker
) -> None:
    wrong = bad_lines(worker.model)
    data = b"\xef\xbb\xbf" + json.dumps(line(0, worker.model)).encode() + b"\r\n\r\n"
    data += b"\n".join(each for each, _, _ in wrong)
    batch = await ended(client, await submitted(client, data))
    assert batch.status == "failed"
    assert [name for name in MOMENTS if getattr(batch, name)] == ["failed_at"]
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.line, each.code, each.param) for each in batch.errors.data] == [
        (number, code, param) for number, (_, code, param) in enumerate(wrong, start=3)
    ]
    assert all(each.message for each in batch.errors.data)
    assert worker.computed == []
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_file_of_blank_lines_is_empty_and_marks_and_line_ends_are_no_part_of_lines(
    client: openai.AsyncOpenAI, worker: EchoWorker
) -> None:
    batch = await ended(client, await submitted(client, b"\n\r\n  \n"))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [each.code for each in batch.errors.data] == ["empty_file"]
    lines = b"\r\n\r\n".join(json.dumps(line(each, worker.model)).encode() for each in range(3))
    batch = await ended(client, await submitted(client, b"\xef\xbb\xbf" + lines))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.total) == ("completed", 3)
    assert len(await lines_of(client, batch.output_file_id)) == 3


async def test_half_of_a_surrogate_pair_in_an_id_is_answered_as_the_replacement_character(
    client: openai.AsyncOpenAI, worker: EchoWorker
) -> None:
    data = json.dumps(line(0, worker.model) | {"custom_id": "a\ud800\U0001f600"}).encode()
    batch = await ended(client, await submitted(client, data))
    assert batch.status == "completed", batch
    assert [each["custom_id"] for each in await lines_of(client, batch.output_file_id)] == ["a\ufffd\U0001f600"]


async def test_output_can_be_read_while_the_batch_runs(client: openai.AsyncOpenAI, worker: EchoWorker) -> None:
    worker.answer = lambda request: echo(request) if request.messages[-1].content != "text 0" else None  # type: ignore[index]
    batch = await submitted(client, jsonl([line(each, worker.model) for each in range(4)]))

    async def partial_lines() -> list[dict[str, Any]]:
        nonlocal batch
        batch = await client.batches.retrieve(batch.id)
        file_id = batch.model_extra["partial_output_file_id"]  # type: ignore[index]
        return await lines_of(client, file_id)

    async with asyncio.timeout(20):
        while len(early := await partial_lines()) < 3:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.05)
    assert (batch.status, batch.output_file_id) == ("in_progress", None)
    file_id = batch.model_extra["partial_output_file_id"]  # type: ignore[index]
    file = await client.files.retrieve(file_id)
    assert (file.status, file.purpose, file.filename) == ("uploaded", "batch_output", f"{batch.id}_output.jsonl")
    with pytest.raises(openai.BadRequestError, match="runs"):
        await client.files.delete(batch.input_file_id)
    with pytest.raises(openai.BadRequestError, match="runs"):
        await client.files.delete(file_id)
    worker.answer = echo
    batch = await ended(client, batch)
    assert batch.output_file_id == file_id
    whole = await lines_of(client, file_id)
    assert whole[:3] == early
    assert len(whole) == 4
    assert (await client.files.retrieve(file_id)).status == "processed"


async def test_cancelled_batch_ends_with_a_line_for_each_line(client: openai.AsyncOpenAI, worker: EchoWorker) -> None:
    worker.answer = lambda request: echo(request) if request.messages[-1].content == "text 0" else None  # type: ignore[index]
    batch = await submitted(client, jsonl([line(each, worker.model) for each in range(1500)]))
    await until(lambda: worker.computed)
    cancelled = await client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    assert batch.cancelling_at <= batch.cancelled_at
    assert batch.completed_at is None
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1499)
    output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert {each["custom_id"] for each in [*output, *errors]} == {f"line-{each}" for each in range(1500)}
    assert len(output) + len(errors) == 1500
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'cancelled'"):
        await client.batches.cancel(batch.id)
    worker.answer = echo
    await asyncio.sleep(1.0)
    assert len(worker.computed) == 1


async def test_batch_that_is_cancelled_at_once_never_computes(client: openai.AsyncOpenAI, worker: EchoWorker) -> None:
    worker.answer = lambda request: None
    batch = await submitted(client, jsonl([line(each, worker.model) for each in range(10)]))
    await client.batches.cancel(batch.id)
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert len(await lines_of(client, batch.error_file_id)) == 10


async def test_lines_of_many_inputs_wait_for_room_and_a_cancel_ends_only_what_is_queued(
    place: Place, client: openai.AsyncOpenAI, worker: EchoWorker
) -> None:
    worker.answer = lambda request: None
    body = {"model": worker.model, "input": [f"text {each}" for each in range(512)]}
    lines = [line(each, worker.model, url="/v1/embeddings", body=body) for each in range(12)]
    batch = await submitted(client, jsonl(lines), endpoint="/v1/embeddings")
    js = worker.nats.jetstream()

    async def num_queued() -> int:
        return int((await js.stream_info(batch_stream(worker.tenant))).state.messages)

    async with asyncio.timeout(20):
        while await num_queued() < 1024:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    assert await num_queued() == 1024
    await client.batches.cancel(batch.id)
    batch = await ended(client, batch)
    errors = await lines_of(client, batch.error_file_id)
    assert [each["error"]["code"] for each in errors] == ["batch_cancelled"] * 12
    kept = KeptResults(js, ResultShares(js, can_purge=True, clock=ServerClock()))
    ends = [await kept.end_of(worker.tenant, f"{each['id']}-0") for each in errors]
    assert sum(end is not None for end in ends) == 2


async def test_expired_batch_gives_what_it_has(client: openai.AsyncOpenAI, worker: EchoWorker) -> None:
    worker.answer = lambda request: echo(request) if request.messages[-1].content == "text 0" else None  # type: ignore[index]
    data = jsonl([line(each, worker.model) for each in range(5)])
    batch = await ended(client, await submitted(client, data, completion_window="5s"))
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert batch.expires_at is not None
    assert batch.expired_at >= batch.expires_at
    assert len(await lines_of(client, batch.output_file_id)) == 1
    errors = await lines_of(client, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert len(errors) == 4


async def test_tenant_sees_no_other_tenants_files_and_batches(
    client: openai.AsyncOpenAI, place: Place, gateway: GatewayProcess, worker: EchoWorker
) -> None:
    batch = await submitted(client, jsonl([line(0, worker.model)]))
    other = next(place.unused)
    async with place.client(gateway, other) as acme, echo_worker(place.nats_url, tenant=other):
        for call in (
            acme.files.retrieve(batch.input_file_id),
            acme.files.content(batch.input_file_id),
            acme.files.delete(batch.input_file_id),
            acme.batches.retrieve(batch.id),
            acme.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="No such File object"):
            await acme.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert [each.id async for each in acme.files.list()] == []
        assert [each.id async for each in acme.batches.list()] == []
    await ended(client, batch)


async def test_tenant_with_many_batches_leaves_seats_to_others(
    client: openai.AsyncOpenAI, place: Place, gateway: GatewayProcess, worker: EchoWorker
) -> None:
    other = next(place.unused)
    async with place.client(gateway, other) as acme, echo_worker(place.nats_url, tenant=other) as idle:
        idle.answer = lambda _: None
        held = [await submitted(acme, jsonl([line(0, idle.model)])) for _ in range(2 * MAX_OF_TENANT + 1)]
        batch = await ended(client, await submitted(client, jsonl([line(0, worker.model)])))
        assert batch.status == "completed"
        for each in held:
            await acme.batches.cancel(each.id)
        for each in held:
            assert (await ended(acme, each)).status == "cancelled"


async def test_key_that_may_not_use_a_model_has_its_lines_refused(place: Place, gateway: GatewayProcess) -> None:
    async with place.client(gateway, "narrow") as narrow, echo_worker(place.nats_url, tenant="narrow") as worker:
        batch = await ended(narrow, await submitted(narrow, jsonl([line(0, worker.model)])))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [("model_not_found", 1)]


async def test_calls_count_against_the_limits_of_their_key(place: Place, gateway: GatewayProcess) -> None:
    async with place.client(gateway, "slow") as slow:
        for _ in range(2):
            await slow.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.RateLimitError):
            await slow.files.create(file=("a.jsonl", b"{}"), purpose="batch")


async def test_batches_are_listed_newest_first_page_by_page(client: openai.AsyncOpenAI, worker: EchoWorker) -> None:
    data = jsonl([line(0, worker.model)])
    made = [(await submitted(client, data)).id for _ in range(5)]
    for batch_id in made:
        await ended(client, await client.batches.retrieve(batch_id))
    page = await client.batches.list(limit=2)
    assert [each.id for each in page.data] == made[:2:-1]
    assert page.has_more
    assert [each.id async for each in client.batches.list(limit=2)] == made[::-1]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"metadata": {str(each): "x" for each in range(17)}}, "metadata"),
        ({"metadata": {"x": "\N{GRINNING FACE}" * 129}}, "metadata"),
        ({"metadata": {"fine": "x", "number": 5}}, "metadata.number"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
async def test_wrong_batch_is_refused_by_the_name_of_its_field(
    client: openai.AsyncOpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await submitted(client, b"{}", **change)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "batch_id", ["batch_" + "0" * 32, "batch_x", "..%2f..%2fx", "batch_*", "*", ">", "a%00b", "x" * 900]
)
async def test_unknown_batch_is_not_found(client: openai.AsyncOpenAI, gateway: GatewayProcess, batch_id: str) -> None:
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {API_KEY}"}) as raw:
        answer = await raw.get(f"{gateway.url}/v1/batches/{batch_id}")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_tenant_without_a_queue_is_told_the_command_that_makes_it(
    client: openai.AsyncOpenAI, tenant: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"`headrace setup --tenants {tenant}`"):
        await submitted(client, jsonl([line(0, "m")]))
