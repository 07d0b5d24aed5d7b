"""Answers `/tokenize` and `/detokenize` for the gateways, any one worker of a model each call.

The calls wait in the encoder's lane for calls: tenants take turns, a full lane is answered at once, and a call that the
gateway no longer waits for is dropped. Answers are encoded in that lane's thread too.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from gpu_worker.consumer.request_images import ImageProcessor, shown
from gpu_worker.text.fair_lane import LaneBusyError
from gpu_worker.text.prompt_encoder import PIECE_CHARACTERS, TOKEN_CHARACTERS, PromptEncoder, cost
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.background_tasks import BackgroundTasks
from shared.conversation import ChatOptions, Conversation
from shared.errors import BadRequestError, PromptTooLongError
from shared.messages import UNDECODABLE, encode
from shared.nats_connection import SEND_ERRORS
from shared.server_clock import ServerClock
from shared.subjects import tokenizer_subject
from shared.tokenizer_calls import DetokenizeCall, TokenizeCall, TokenizerCall, TokenizerReply

QUEUE_GROUP = "tokenizers"
MAX_CALLS = 256
# So that no tenant keeps the others out.
MAX_CALLS_OF_ONE = MAX_CALLS // 4
# What an image costs in the lane, beside characters: it becomes some thousand token ids.
_IMAGE_CHARACTERS = 1024 * TOKEN_CHARACTERS

_decode = msgspec.msgpack.Decoder(TokenizerCall).decode
_log = logging.getLogger(__name__)


class TokenizerService:
    """Owns the calls in progress."""

    def __init__(
        self,
        nats: Client,
        model: str,
        max_model_len: int,
        tokenizer: ModelTokenizer,
        encoder: PromptEncoder,
        clock: ServerClock | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        self._processor = processor
        self._nats = nats
        self._clock = clock or ServerClock()
        self._model = model
        self._max_model_len = max_model_len
        self._vocab_size = tokenizer.vocab_size
        self._encoder = encoder
        self._tasks = BackgroundTasks()
        self._calls: Counter[str] = Counter()

    async def start(self) -> None:
        """Begin to answer."""
        await self._nats.subscribe(tokenizer_subject(self._model), queue=QUEUE_GROUP, cb=self._receive)

    async def _receive(self, message: Msg) -> None:
        if not message.reply:
            return
        if len(self._tasks) >= MAX_CALLS:
            await self._respond(message, encode(_busy(LaneBusyError(1.0))))
            return
        self._tasks.spawn(self._answer(message))

    async def _answer(self, message: Msg) -> None:
        try:
            payload = await self._run(_decode(message.data))
        except LaneBusyError as error:
            payload = encode(_busy(error))
        except BadRequestError as error:
            payload = encode(TokenizerReply(error=str(error)[:500], code=error.code, param=error.param))
        except UNDECODABLE as error:
            payload = encode(TokenizerReply(error=str(error)[:500]))
        await self._respond(message, payload)

    async def _run(self, call: TokenizerCall) -> bytes:
        """Return the encoded answer of a call when it is its tenant's turn."""
        if self._calls[call.tenant] >= MAX_CALLS_OF_ONE:
            raise LaneBusyError(1.0)
        self._calls[call.tenant] += 1
        try:
            return await self._encoder.calls.run(
                call.tenant,
                self._checked_size(call),
                lambda: self._reply(call),
                lambda: call.deadline is None or self._clock.now() < call.deadline,
            )
        finally:
            self._calls[call.tenant] -= 1
            if not self._calls[call.tenant]:
                del self._calls[call.tenant]

    async def _respond(self, message: Msg, payload: bytes) -> None:
        if len(payload) > self._nats.max_payload:
            error = "The answer is too large for one message; send less at once."
            payload = encode(TokenizerReply(error=error, code="request_too_large"))
        try:
            await self._nats.publish(message.reply, payload)
        except SEND_ERRORS as error:
            _log.warning("tokenizer call not answered", extra={"error": repr(error)})

    def _checked_size(self, call: TokenizerCall) -> int:
        """Return how much work a call is, after what can be checked without doing it."""
        if isinstance(call, DetokenizeCall):
            if call.token_ids and max(call.token_ids) >= self._vocab_size:
                limit = self._vocab_size - 1
                wrong = max(call.token_ids)
                raise BadRequestError(f"Token id {wrong} is not one of this model's, 0 to {limit}.", "tokens")
            return PIECE_CHARACTERS + TOKEN_CHARACTERS * len(call.token_ids)
        if (call.text is None) == (call.messages is None):
            raise BadRequestError("Give either a text or messages.", "prompt")
        if call.media and self._processor is None:
            raise BadRequestError(f"The model {self._model!r} reads no images.", "media")
        prompt = _prompt(call)
        self._encoder.check_length(prompt, self._encoder.max_call_characters)
        num_images = sum(len(message.images) for message in call.messages or ())
        return cost(prompt) + _IMAGE_CHARACTERS * num_images

    def _reply(self, call: TokenizerCall) -> bytes:
        """Return the encoded answer. Runs in the lane's thread."""
        if isinstance(call, DetokenizeCall):
            text = self._encoder.decode_now(call.token_ids)
            return encode(TokenizerReply(text=text, max_model_len=self._max_model_len))
        prompt = _prompt(call)
        token_ids: list[int] = []
        if prompt != "":
            token_ids = self._token_ids(prompt, add_special_tokens=call.add_special_tokens)
        if call.media and self._processor is not None:
            token_ids, _ = self._processor.expand(token_ids, shown(call.messages or (), call.media))
        return encode(TokenizerReply(token_ids=tuple(token_ids), max_model_len=self._max_model_len))

    def _token_ids(self, prompt: str | Conversation, *, add_special_tokens: bool) -> list[int]:
        limit = self._encoder.max_call_tokens
        try:
            return self._encoder.encode_now(prompt, add_special_tokens=add_special_tokens, max_tokens=limit).token_ids
        except PromptTooLongError as error:
            message = f"The text has {error.num_prompt_tokens} tokens; at most {limit} are returned at once. Send less."
            raise BadRequestError(message, error.param, error.code) from None


def _prompt(call: TokenizeCall) -> str | Conversation:
    if call.messages is not None:
        return Conversation(call.messages, call.chat or ChatOptions())
    assert call.text is not None
    return call.text


def _busy(error: LaneBusyError) -> TokenizerReply:
    return TokenizerReply(error=str(error), retry_after_s=error.retry_after_s)
