from __future__ import annotations

import asyncio
import threading
import time

import msgspec
import pytest
from msgspec.structs import replace

from gpu_worker.consumer.tokenizer_service import MAX_CALLS_OF_ONE, TokenizerService
from gpu_worker.text import prompt_encoder
from gpu_worker.text.prompt_encoder import MAX_WAITING_CALL_BYTES, MIN_CALL_CHARACTERS
from shared.conversation import ChatMessage, ChatOptions
from shared.media import ContentImage
from shared.messages import encode
from shared.subjects import tokenizer_subject
from shared.tokenizer_calls import DetokenizeCall, TokenizeCall, TokenizerCall, TokenizerReply
from tests.gpu_worker.consumer.harness import TOKENIZER, MakeWorker, RunningWorker, TestGateway, wait_until


async def _call(gateway: TestGateway, call: TokenizerCall) -> TokenizerReply:
    reply = await gateway.nats.request(tokenizer_subject(gateway.model), encode(call), timeout=60)
    return msgspec.msgpack.decode(reply.data, type=TokenizerReply)


async def test_text_and_conversation_are_tokenized(worker: RunningWorker, gateway: TestGateway) -> None:
    reply = await _call(gateway, TokenizeCall(text="naïve x"))
    assert reply == TokenizerReply(token_ids=tuple(TOKENIZER.encode_text("naïve x")), max_model_len=2048)
    messages = (ChatMessage(role="user", content="hi"),)
    for add_generation_prompt in (True, False):
        options = ChatOptions(add_generation_prompt=add_generation_prompt)
        call = TokenizeCall(messages=messages, chat=options)
        expected = TOKENIZER.encode_chat(messages, options).token_ids
        assert (await _call(gateway, call)).token_ids == tuple(expected)


async def test_token_ids_are_turned_back_to_text(worker: RunningWorker, gateway: TestGateway) -> None:
    token_ids = tuple(TOKENIZER.encode_text("naïve x"))
    assert (await _call(gateway, DetokenizeCall(token_ids=token_ids))).text == "naïve x"


async def test_long_text_is_tokenized_next_to_short_ones(worker: RunningWorker, gateway: TestGateway) -> None:
    reply = await _call(gateway, TokenizeCall(text="x = 1\n" * 20_000))
    assert len(reply.token_ids) >= 60_000


async def test_bad_call_is_answered_with_an_error(worker: RunningWorker, gateway: TestGateway) -> None:
    assert "4096" in ((await _call(gateway, DetokenizeCall(token_ids=(4096,)))).error or "")
    assert (await _call(gateway, TokenizeCall())).error
    reply = await _call(gateway, TokenizeCall(text="x", messages=()))
    assert reply.error
    assert (reply.code, reply.param) == ("invalid_value", "prompt")


async def test_empty_text_has_no_tokens(worker: RunningWorker, gateway: TestGateway) -> None:
    assert await _call(gateway, TokenizeCall(text="")) == TokenizerReply(max_model_len=2048)


async def test_text_too_long_is_refused_by_its_length(worker: RunningWorker, gateway: TestGateway) -> None:
    limit = MIN_CALL_CHARACTERS
    reply = await _call(gateway, TokenizeCall(text="x" * (limit + 1)))
    assert reply.error is not None
    assert f"at most {limit}" in reply.error
    assert (reply.code, reply.retry_after_s) == ("context_length_exceeded", None)


async def test_conversation_of_too_many_tokens_is_refused_for_its_length(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_encoder, "MIN_CALL_CHARACTERS", 1)
    await make_worker()
    reply = await _call(gateway, TokenizeCall(messages=(ChatMessage(role="user", content="\u0994 " * 1000),)))
    assert (reply.code, reply.param) == ("context_length_exceeded", "messages")


async def test_full_lane_is_answered_at_once_and_says_when_to_return(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    text = "x = 1\n" * (MIN_CALL_CHARACTERS // 6)
    replies = await asyncio.gather(*(_call(gateway, TokenizeCall(text=text, tenant="greedy")) for _ in range(40)))
    served = [reply for reply in replies if reply.error is None]
    busy = [reply for reply in replies if reply.retry_after_s is not None]
    assert len(served) + len(busy) == 40
    # One tenant may fill half of the lane, in bytes and in seconds; one call may always wait.
    assert 1 <= len(served) <= MAX_WAITING_CALL_BYTES // 2 // len(text) + 2
    assert all(reply.retry_after_s and reply.retry_after_s >= 1 for reply in busy)


_EMPTY = ChatMessage(role="user", content="")


@pytest.mark.parametrize(
    "call",
    [
        TokenizeCall(messages=(replace(_EMPTY, part_lengths=(0,) * 4096),) * 9, tenant="t"),
        TokenizeCall(messages=(replace(_EMPTY, images=(ContentImage(0, 0),) * 64),) * 5, tenant="t"),
        DetokenizeCall(token_ids=(65,) * 300_000, tenant="t"),
    ],
)
async def test_calls_without_a_character_fill_the_lane(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, call: TokenizerCall
) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(TokenizerService, "_reply", lambda *_: may_answer.wait(30) and encode(TokenizerReply()))
    calls = [asyncio.create_task(_call(gateway, call)) for _ in range(6)]
    # One is worked on and one waits: each takes more than a tenant's share of the lane.
    await wait_until(lambda: sum(call.done() for call in calls) == 4)
    may_answer.set()
    replies = await asyncio.gather(*calls)
    assert sum(reply.retry_after_s is not None for reply in replies) == 4


async def test_calls_of_one_tenant_leave_room_for_those_of_others(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, answer = threading.Event(), TokenizerService._reply

    def late(service: TokenizerService, call: TokenizerCall) -> bytes:
        assert may_answer.wait(30)
        return answer(service, call)

    monkeypatch.setattr(TokenizerService, "_reply", late)
    greedy = [asyncio.create_task(_call(gateway, TokenizeCall(text="x", tenant="greedy"))) for _ in range(300)]
    # Those that are too many are told so.
    await wait_until(lambda: sum(call.done() for call in greedy) == len(greedy) - MAX_CALLS_OF_ONE)
    other = asyncio.create_task(_call(gateway, TokenizeCall(text="x", tenant="other")))
    may_answer.set()
    assert (await other).error is None
    replies = await asyncio.gather(*greedy)
    assert sum(reply.error is None for reply in replies) == MAX_CALLS_OF_ONE
    assert all(reply.error is None or reply.retry_after_s == 1 for reply in replies)
    assert (await _call(gateway, TokenizeCall(text="x", tenant="greedy"))).error is None


async def test_call_that_the_gateway_has_given_up_is_dropped(worker: RunningWorker, gateway: TestGateway) -> None:
    payload = encode(TokenizeCall(text="x", deadline=time.time() - 1))
    with pytest.raises(TimeoutError):
        await gateway.nats.request(tokenizer_subject(gateway.model), payload, timeout=0.5)
    assert (await _call(gateway, TokenizeCall(text="x", deadline=time.time() + 60))).token_ids
