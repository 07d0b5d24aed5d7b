"""`truncation: "auto"` through OpenAI's own client, with a worker that counts each word as a token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from openai.types.responses import Response

from gateway.responses.truncation import beginning_at, max_prompt_tokens, turn_starts
from shared.conversation import ChatMessage, ChatOptions
from shared.hosted_models import HostBeat, HostedModel, HostedState, ModelOrder
from shared.messages import Finish, Request, Usage, encode
from shared.subjects import host_subject, model_order_subject, tokenizer_subject
from shared.tokenizer_calls import TokenizeCall, TokenizerReply
from tests.gateway.parsed_bodies import messages_of, response
from tests.gateway.responses.batch_worker import batch_worker
from tests.gateway.wire_worker import WireWorker
from tests.waiting import until

CONTEXT = 8192
OUTPUT = 4
LIMIT = CONTEXT - OUTPUT
PNG = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def num_words(messages: tuple[ChatMessage, ...], chat: ChatOptions | None) -> int:
    calls = [call.arguments for message in messages for call in message.tool_calls]
    texts = [*(message.content for message in messages), *calls, "" if chat is None else chat.tools or ""]
    return sum(len(text.split()) for text in texts)


@dataclass
class Words:
    """A tokenizer of words, and the calls that it has answered.

    Attributes:
        refusal: Returns why a call is refused; None for one that is answered.
    """

    worker: WireWorker
    calls: list[TokenizeCall] = field(default_factory=list)
    refusal: Callable[[TokenizeCall], TokenizerReply | None] = field(default=lambda call: None)

    async def answer(self, message: Msg) -> None:
        call = msgspec.msgpack.decode(message.data, type=TokenizeCall)
        assert call.messages is not None
        self.calls.append(call)
        reply = TokenizerReply(token_ids=(1,) * num_words(call.messages, call.chat), max_model_len=CONTEXT)
        await message.respond(encode(self.refusal(call) or reply))

    async def read(self) -> tuple[Request, list[str]]:
        """Answer the next request, as a worker whose tokens are words; return it, and how each message begins."""
        request = await self.worker.begin(1)
        messages = request.messages or ()
        num = num_words(messages, request.chat)
        finish = Finish("failed", None, "too long", "messages", "context_length_exceeded") if num >= CONTEXT else None
        await self.worker.end(request, 1, finish or Finish("stop", Usage(num, 1)))
        return request, [(message.content or message.tool_calls[0].name)[:8].strip() for message in messages]


@pytest.fixture
async def words(worker: WireWorker) -> Words:
    words = Words(worker)
    await worker.nats.subscribe(tokenizer_subject(worker.model), cb=words.answer)
    await worker.nats.flush()
    return words


def said(role: str, name: str, num: int = 1) -> dict[str, Any]:
    """Return a message with this many words, the first of which is its name."""
    return {"role": role, "content": " ".join([name, *["w"] * (num - 1)])}


def turn(name: str, num: int) -> list[dict[str, Any]]:
    return [said("user", f"u{name}", num - 1), said("assistant", f"a{name}")]


def called(call_id: str, num: int) -> list[dict[str, Any]]:
    arguments = json.dumps({"x": " ".join(["w"] * (num - 1))})
    return [
        {"type": "function_call", "call_id": call_id, "name": f"f{call_id}", "arguments": arguments},
        {"type": "function_call_output", "call_id": call_id, "output": f"o{call_id}"},
    ]


def ask(client: openai.AsyncOpenAI, words: Words, items: Any, **fields: Any) -> asyncio.Task[Any]:
    asked = {"model": words.worker.model, "input": items, "max_output_tokens": OUTPUT, "truncation": "auto"}
    return asyncio.create_task(client.responses.create(**asked | fields))


async def test_oldest_turns_are_dropped_and_what_is_read_is_counted(words: Words, client: openai.AsyncOpenAI) -> None:
    items = [said("developer", "rule"), *turn("1", 4000), *turn("2", 4000), said("system", "more"), *turn("3", 3000)]
    asking = ask(client, words, [*items, said("user", "last", 10)], instructions="Answer.")
    _, read = await words.read()
    answer = await asking
    assert read == ["Answer.", "rule", "u2 w w w", "a2", "more", "u3 w w w", "a3", "last w w"]
    assert (answer.truncation, answer.usage.input_tokens) == ("auto", 1 + 1 + 4000 + 1 + 3000 + 10)
    # All that was said is kept, and read as far as it fits.
    listed = await client.responses.input_items.with_raw_response.list(answer.id, order="asc")
    kept = json.loads(listed.text)["data"]
    assert len(kept) == len(items) + 1


@pytest.mark.parametrize(("num_last", "num_dropped"), [(LIMIT - 4002, 0), (LIMIT - 4001, 1)])
async def test_conversation_that_fits_exactly_is_whole(
    words: Words, client: openai.AsyncOpenAI, num_last: int, num_dropped: int
) -> None:
    items = [*turn("1", 2), *turn("2", 4000), said("user", "last", num_last)]
    asking = ask(client, words, items)
    request, read = await words.read()
    assert len(read) == len(items) - 2 * num_dropped
    assert num_words(request.messages or (), None) == LIMIT + (-1 if num_dropped else 0)
    assert (await asking).usage.input_tokens <= LIMIT


async def test_tools_take_their_part_of_the_context(words: Words, client: openai.AsyncOpenAI) -> None:
    text = " ".join(["w"] * 3000)
    tool = {"type": "function", "name": "f", "description": text, "parameters": {"type": "object"}, "strict": False}
    asking = ask(client, words, [*turn("1", 3000), *turn("2", 3000), said("user", "last")], tools=[tool])
    _, read = await words.read()
    assert read == ["u2 w w w", "a2", "last"]
    await asking


def refuses_two_users_in_a_row(call: TokenizeCall) -> TokenizerReply | None:
    roles = [message.role for message in call.messages or ()]
    if ("user", "user") not in pairwise(roles):
        return None
    return TokenizerReply(error="Roles must alternate.", code="invalid_value", param="messages")


async def test_conversation_that_is_refused_for_another_reason_than_its_length_is_not_shortened(
    words: Words, client: openai.AsyncOpenAI
) -> None:
    words.refusal = refuses_two_users_in_a_row
    items = [said("user", "u0", 1200), said("user", "u1", 1200), said("assistant", "a1"), said("user", "last")]
    with pytest.raises(openai.BadRequestError, match="Roles must alternate") as refusal:
        await ask(client, words, items)
    assert (refusal.value.code, refusal.value.param) == ("invalid_value", "input")
    # A worker of an earlier version gives no code.
    words.refusal = lambda call: TokenizerReply(error="It cannot be read.")
    with pytest.raises(openai.BadRequestError, match="It cannot be read"):
        await ask(client, words, items)


async def test_text_that_is_too_long_to_be_counted_is_shortened(words: Words, client: openai.AsyncOpenAI) -> None:
    def refusal(call: TokenizeCall) -> TokenizerReply | None:
        is_long = num_words(call.messages or (), None) > CONTEXT
        return TokenizerReply(error="It is too long.", code="context_length_exceeded") if is_long else None

    words.refusal = refusal
    asking = ask(client, words, [*turn("1", 6000), *turn("2", 6000), said("user", "last")])
    _, read = await words.read()
    assert read == ["u2 w w w", "a2", "last"]
    await asking


async def test_short_conversation_is_not_counted(words: Words, client: openai.AsyncOpenAI) -> None:
    asking = ask(client, words, [*turn("1", 100), said("user", "last")])
    assert len((await words.read())[1]) == 3
    await asking
    assert words.calls == []


async def test_few_calls_count_many_turns(words: Words, client: openai.AsyncOpenAI) -> None:
    items = [item for number in range(100) for item in turn(str(number), 200)]
    asking = ask(client, words, [*items, said("user", "last")])
    _, read = await words.read()
    assert read[0].split()[0] == f"u{100 - (LIMIT - 1) // 200}"
    await asking
    assert len(words.calls) <= 8


async def test_agent_that_continues_stored_responses_keeps_its_newest_calls(
    words: Words, client: openai.AsyncOpenAI
) -> None:
    asking = ask(client, words, [said("user", "task"), *steps(*[1000] * 6)])
    assert len((await words.read())[1]) == 1 + 2 * 6
    asking = ask(client, words, called("next", 4000), previous_response_id=(await asking).id, stream=True)
    request, read = await words.read()
    assert read[:3] == ["task", "f2", "o2"]
    results = [message.tool_call_id for message in request.messages or () if message.tool_call_id]
    assert results == ["2", "3", "4", "5", "next"]
    events = [event async for event in await asking]
    assert events[-1].response.status == "completed"


async def test_conversation_of_stored_responses_is_shortened_each_time(
    words: Words, client: openai.AsyncOpenAI
) -> None:
    previous: str | None = None
    for number in range(5):
        asking = ask(client, words, said("user", f"u{number}", 3000)["content"], previous_response_id=previous)
        _, read = await words.read()
        previous = (await asking).id
        users = [text.split()[0] for text in read if text.startswith("u")]
        assert users == [f"u{each}" for each in range(max(0, number - 1), number + 1)]
    # What was dropped is still there for a request that does not ask for it to be dropped.
    asking = ask(client, words, "more", previous_response_id=previous, truncation="disabled")
    assert len((await words.read())[1]) == 11
    with pytest.raises(openai.BadRequestError) as refusal:
        await asking
    assert refusal.value.code == "context_length_exceeded"


async def test_call_and_result_are_dropped_or_kept_together(words: Words, client: openai.AsyncOpenAI) -> None:
    divided, result = called("2", 2000)
    items = [
        said("user", "u1"), *called("1", 4000),
        said("user", "u2"), divided, said("user", "u3", 2000), result,
        said("user", "u4", 2000), *called("4", 2100),
    ]  # fmt: skip
    asking = ask(client, words, items)
    request, read = await words.read()
    assert [text.split()[0] for text in read] == ["u2", "f2", "u3", "o2", "u4", "f4", "o4"]
    await asking
    calls = {call.id for message in request.messages or () for call in message.tool_calls}
    assert calls == {message.tool_call_id for message in request.messages or () if message.tool_call_id}
    # One word more, and the call goes with its result, not the message before it alone.
    asking = ask(client, words, [*items[:-2], *called("4", 2200)])
    request, read = await words.read()
    assert [text.split()[0] for text in read] == ["u4", "f4", "o4"]
    await asking


def steps(*nums: int) -> list[dict[str, Any]]:
    return [item for number, num in enumerate(nums) for item in called(str(number), num)]


async def test_oldest_calls_and_results_of_the_only_turn_are_dropped(words: Words, client: openai.AsyncOpenAI) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    parallel = [item for both in zip(called("p", 1000), called("q", 1000), strict=True) for item in both]
    items = [said("system", "rule"), *turn("1", 10), said("user", "task"), *steps(*[200] * 50), thought, *parallel]
    asking = ask(client, words, items)
    request, read = await words.read()
    # 2,002 words of the last step, 201 of each other one, and two messages.
    assert read[:3] == ["rule", "task", f"f{50 - (LIMIT - 2004) // 201}"]
    assert read[-3:] == ["fp", "op", "oq"]
    assert (request.messages or ())[-3].reasoning == "hm"
    await asking


async def test_last_call_is_kept_even_where_it_is_too_long(words: Words, client: openai.AsyncOpenAI) -> None:
    asking = ask(client, words, [said("user", "task"), *steps(200, 200, CONTEXT)])
    _, read = await words.read()
    assert read == ["task", "f2", "o2"]
    with pytest.raises(openai.BadRequestError) as refusal:
        await asking
    assert refusal.value.code == "context_length_exceeded"


async def test_streamed_response_is_shortened(words: Words, client: openai.AsyncOpenAI) -> None:
    asking = ask(client, words, [*turn("1", 6000), *turn("2", 6000), said("user", "last")], stream=True)
    _, read = await words.read()
    events = [event async for event in await asking]
    assert read == ["u2 w w w", "a2", "last"]
    assert (events[0].response.truncation, events[-1].response.usage.input_tokens) == ("auto", 6001)


async def test_background_response_is_shortened(words: Words, client: openai.AsyncOpenAI, nats_url: str) -> None:
    async with batch_worker(nats_url, words.worker.model) as batch:
        items = [*turn("1", 6000), *turn("2", 6000), said("user", "last")]
        queued = await ask(client, words, items, background=True)
        job = await batch.take()
        assert [message.content[:4].strip() for message in job.messages or ()] == ["u2 w", "a2", "last"]
        await batch.end(job, "text")
    answer = await client.responses.retrieve(queued.id)
    assert isinstance(answer, Response)
    assert (answer.truncation, answer.status, answer.output_text) == ("auto", "completed", "text")


async def test_without_a_worker_that_could_count_the_client_comes_again(
    words: Words, client: openai.AsyncOpenAI
) -> None:
    items = [*turn("1", 6000), *turn("2", 6000), said("user", "last")]
    words.worker.draining = True
    while True:
        asking, reading = ask(client, words, items), asyncio.create_task(words.read())
        # Until the gateway has heard that the worker takes nothing more, the response is as any other.
        await asyncio.wait([asking, reading], return_when=asyncio.FIRST_COMPLETED)
        if asking.done() and (refusal := asking.exception()) is not None:
            break
        await asyncio.gather(asking, reading)
    reading.cancel()
    assert isinstance(refusal, openai.InternalServerError)
    assert (refusal.status_code, refusal.code) == (503, "no_worker")
    assert float(refusal.response.headers["retry-after"]) > 0
    with pytest.raises(openai.InternalServerError):
        await ask(client, words, items, background=True)


@dataclass
class Host:
    """A host of one model, and the orders that it gets."""

    nats: Client
    model: str
    orders: list[ModelOrder] = field(default_factory=list)
    state: HostedState = "asleep"

    async def tell_forever(self) -> None:
        async def hear(message: Msg) -> None:
            self.orders.append(msgspec.msgpack.decode(message.data, type=ModelOrder))

        await self.nats.subscribe(model_order_subject("host"), cb=hear)
        while True:
            model = HostedModel(name=self.model, path="/m", state=self.state, on_demand=True, ready_in_s=1.0)
            await self.nats.publish(host_subject("host"), encode(HostBeat(host="host", models=(model,))))
            await asyncio.sleep(0.05)


@pytest.fixture
async def host(words: Words) -> AsyncIterator[Host]:
    host = Host(words.worker.nats, f"sleeper-{words.worker.model}")
    telling = asyncio.create_task(host.tell_forever())
    yield host
    telling.cancel()


async def served(client: openai.AsyncOpenAI, model: str) -> None:
    """Wait until the gateway knows a model."""
    async with asyncio.timeout(10):
        while model not in [each.id async for each in await client.models.list()]:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def test_response_of_a_sleeping_model_has_it_loaded_and_is_shortened_then(
    host: Host, client: openai.AsyncOpenAI, nats_url: str
) -> None:
    await served(client, host.model)
    items = [*turn("1", 6000), *turn("2", 6000), said("user", "last")]
    asked: Any = {"model": host.model, "input": items, "max_output_tokens": OUTPUT, "truncation": "auto"}
    asking = asyncio.create_task(client.responses.create(**asked, extra_body={"timeout": 20}))
    await until(lambda: host.orders)
    assert host.orders[0] == ModelOrder(action="wake", name=host.model)
    host.state = "awake"
    async with WireWorker(nats_url, host.model, "woken") as worker:
        words = Words(worker)
        await worker.nats.subscribe(tokenizer_subject(host.model), cb=words.answer)
        request, read = await words.read()
        assert read == ["u2 w w w", "a2", "last"]
        assert (await asking).usage.input_tokens == 6001
    assert request.deadline is not None
    # The wait for the model is part of the client's time.
    assert request.created is not None
    assert request.deadline - request.created < 20


async def test_response_of_a_model_that_cannot_be_loaded_in_time_is_refused(
    host: Host, client: openai.AsyncOpenAI
) -> None:
    await served(client, host.model)
    items = [*turn("1", 6000), *turn("2", 6000), said("user", "last")]
    asked: Any = {"model": host.model, "input": items, "truncation": "auto", "extra_body": {"timeout": 0.5}}
    with pytest.raises(openai.InternalServerError) as refusal:
        await client.responses.create(**asked)
    assert (refusal.value.status_code, refusal.value.code) == (503, "waking")
    await until(lambda: host.orders)
    host.state = "failed"
    async with asyncio.timeout(10):
        while refusal.value.code != "model_failed":
            with pytest.raises(openai.InternalServerError) as refusal:
                await client.responses.create(**asked)


async def test_last_turn_that_is_too_long_is_refused_as_without_truncation(
    words: Words, client: openai.AsyncOpenAI
) -> None:
    items = [*turn("1", 100), said("user", "last", CONTEXT)]
    refusals = []
    for truncation in ("auto", "disabled"):
        asking = ask(client, words, items, truncation=truncation)
        _, read = await words.read()
        assert len(read) == (1 if truncation == "auto" else 3)
        with pytest.raises(openai.BadRequestError) as refusal:
            await asking
        refusals.append((refusal.value.status_code, refusal.value.code, refusal.value.param))
    assert refusals == [(400, "context_length_exceeded", "input")] * 2


async def test_error_of_length_names_the_longest_field(words: Words, client: openai.AsyncOpenAI) -> None:
    for num, field_name in ((CONTEXT, "instructions"), (CONTEXT // 2 - 1, "input")):
        instructions = " ".join(["w"] * num)
        asking = ask(client, words, said("user", "last", CONTEXT // 2 + 1)["content"], instructions=instructions)
        await words.read()
        with pytest.raises(openai.BadRequestError) as refusal:
            await asking
        assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", field_name)


async def test_count_of_input_tokens_is_of_what_would_be_read(words: Words, client: openai.AsyncOpenAI) -> None:
    items: Any = [*turn("1", 6000), *turn("2", 6000), said("user", "last")]
    for truncation, num in (("auto", 6001), ("disabled", 12001)):
        asked: Any = {"model": words.worker.model, "input": items, "truncation": truncation}
        counted = await client.responses.input_tokens.count(**asked)
        assert counted.input_tokens == num


def test_long_answer_keeps_half_of_the_context_for_the_conversation() -> None:
    assert [max_prompt_tokens(CONTEXT, each) for each in (1, 100, CONTEXT)] == [8191, 8092, 4096]


async def test_answer_of_any_length_has_a_quarter_of_the_context(words: Words, client: openai.AsyncOpenAI) -> None:
    assert [max_prompt_tokens(length, None) for length in (CONTEXT, 1 << 20)] == [6144, (1 << 20) - 16384]
    asking = ask(client, words, [*turn("1", 3000), *turn("2", 3000), said("user", "last", 145)], max_output_tokens=None)
    request, read = await words.read()
    assert read == ["u2 w w w", "a2", "last w w"]
    assert request.sampling.max_tokens is None
    await asking


def test_images_of_dropped_turns_are_dropped() -> None:
    def shows(text: str) -> dict[str, Any]:
        return {
            "role": "user",
            "content": [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": PNG}],
        }

    generation = response([{**shows("rule"), "role": "system"}, shows("one"), shows("two")])
    (prompt,) = generation.prompts
    starts = turn_starts(messages_of(generation))
    assert starts == [1, 2]
    shorter = beginning_at(prompt, 2)
    assert [image.where for image in shorter.images] == [prompt.images[0].where, prompt.images[2].where]
    assert [message.images[0].index for message in shorter.messages or ()] == [0, 1]
    assert shorter.estimated_tokens < prompt.estimated_tokens


def test_conversation_without_a_user_is_one_turn() -> None:
    assert turn_starts(messages_of(response([said("assistant", "a"), said("assistant", "b")]))) == [0]
    assert turn_starts(messages_of(response([said("system", "a")]))) == [1]
