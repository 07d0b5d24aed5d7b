"""Answers `/tokenize` and `/detokenize` for the gateways, any one worker of a model each call."""

from __future__ import annotations

import asyncio

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from gpu_worker.text.prompt_encoder import PromptEncoder
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError
from shared.messages import TokenizeCall, TokenizerCall, TokenizerReply, encode
from shared.subjects import tokenizer_subject

QUEUE_GROUP = "tokenizers"
MAX_CALLS = 64

_decode = msgspec.msgpack.Decoder(TokenizerCall).decode


class TokenizerService:
    """Owns the calls in progress; more than a bound are refused, so that they cannot starve generation."""

    def __init__(
        self, nats: Client, model: str, max_model_len: int, tokenizer: ModelTokenizer, encoder: PromptEncoder
    ) -> None:
        """Serve the model under this name."""
        self._nats = nats
        self._model = model
        self._max_model_len = max_model_len
        self._vocab_size = tokenizer.vocab_size
        self._encoder = encoder
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to answer."""
        await self._nats.subscribe(tokenizer_subject(self._model), queue=QUEUE_GROUP, cb=self._receive)

    async def _receive(self, message: Msg) -> None:
        if not message.reply:
            return
        if len(self._tasks) >= MAX_CALLS:
            await self._respond(message, TokenizerReply(error="The tokenizer is busy; try again."))
            return
        task = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Msg) -> None:
        try:
            reply = await self._call(_decode(message.data))
        except (BadRequestError, msgspec.MsgspecError, RecursionError, ValueError) as error:
            reply = TokenizerReply(error=str(error)[:500])
        await self._respond(message, reply)

    async def _respond(self, message: Msg, reply: TokenizerReply) -> None:
        payload = encode(reply)
        if len(payload) > self._nats.max_payload:
            payload = encode(TokenizerReply(error="The answer is too large for one message; send less at once."))
        await self._nats.publish(message.reply, payload)

    async def _call(self, call: TokenizerCall) -> TokenizerReply:
        if not isinstance(call, TokenizeCall):
            return TokenizerReply(text=await self._detokenize(call.token_ids), max_model_len=self._max_model_len)
        if (call.text is None) == (call.messages is None):
            raise BadRequestError("Give either a text or messages.", "prompt")
        prompt = call.messages if call.text is None else call.text
        assert prompt is not None
        if prompt == "":
            return TokenizerReply(max_model_len=self._max_model_len)
        token_ids = await self._encoder.encode(
            prompt, add_special_tokens=call.add_special_tokens, add_generation_prompt=call.add_generation_prompt
        )
        return TokenizerReply(token_ids=tuple(token_ids), max_model_len=self._max_model_len)

    async def _detokenize(self, token_ids: tuple[int, ...]) -> str:
        if token_ids and max(token_ids) >= self._vocab_size:
            limit = self._vocab_size - 1
            raise BadRequestError(f"Token id {max(token_ids)} is not one of this model's, 0 to {limit}.", "tokens")
        return await self._encoder.decode(token_ids)
