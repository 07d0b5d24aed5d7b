from __future__ import annotations

import msgspec

from shared.messages import ChatMessage, DetokenizeCall, TokenizeCall, TokenizerReply, encode
from shared.subjects import tokenizer_subject
from tests.gpu_worker.consumer.harness import TOKENIZER, RunningWorker, TestGateway


async def _call(gateway: TestGateway, call: TokenizeCall | DetokenizeCall) -> TokenizerReply:
    reply = await gateway.nats.request(tokenizer_subject(gateway.model), encode(call), timeout=10)
    return msgspec.msgpack.decode(reply.data, type=TokenizerReply)


async def test_text_and_conversation_are_tokenized(worker: RunningWorker, gateway: TestGateway) -> None:
    reply = await _call(gateway, TokenizeCall(text="naïve x"))
    assert reply == TokenizerReply(token_ids=tuple(TOKENIZER.encode_text("naïve x")), max_model_len=2048)
    messages = (ChatMessage(role="user", content="hi"),)
    for add_generation_prompt in (True, False):
        call = TokenizeCall(messages=messages, add_generation_prompt=add_generation_prompt)
        expected = TOKENIZER.encode_chat(messages, add_generation_prompt=add_generation_prompt)
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
    assert (await _call(gateway, TokenizeCall(text="x", messages=()))).error


async def test_empty_text_has_no_tokens(worker: RunningWorker, gateway: TestGateway) -> None:
    assert await _call(gateway, TokenizeCall(text="")) == TokenizerReply(max_model_len=2048)
