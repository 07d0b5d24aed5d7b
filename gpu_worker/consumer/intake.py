"""From a pulled request to a sequence in the engine: checks, the prompt's tokens, the text already delivered."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from gpu_worker.consumer.appetite import Appetite
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests, Prelude
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine_thread import EngineStoppedError, EngineThread
from gpu_worker.model_directory import ModelDirectory
from gpu_worker.text.prompt_encoder import PromptEncoder
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError, PromptTooLongError
from shared.messages import ChatMessage, Request

_log = logging.getLogger(__name__)


class Lane(Protocol):
    """What intake tells a lane about a request."""

    def admitted(self, held: HeldRequest) -> None:
        """The engine has it."""

    def refuse(self, held: HeldRequest, error: BadRequestError) -> None:
        """It can never run."""

    def fail(self, held: HeldRequest, error: str) -> None:
        """Something went wrong here that is not the request's fault."""

    def give_back(self, held: HeldRequest) -> None:
        """It cannot run here any more."""


class Intake:
    """Admits requests. Adds to the table of held requests what it learns about each."""

    def __init__(
        self,
        *,
        model: str,
        directory: ModelDirectory,
        max_model_len: int,
        tokenizer: ModelTokenizer,
        encoder: PromptEncoder,
        engine: EngineThread,
        held: HeldRequests,
        appetite: Appetite,
    ) -> None:
        """Admit requests for the model served under the name `model`."""
        self._model = model
        self._eos_token_ids = directory.eos_token_ids
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._engine = engine
        self._held = held
        self._appetite = appetite
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, held: HeldRequest, lane: Lane) -> None:
        """Take a request that has just been added to the table towards the engine; a long prompt takes a while."""
        request = held.request
        try:
            self._check(request)
            prompt = _prompt(request)
            if isinstance(prompt, list):
                self._admit(held, lane, prompt)
            elif self._encoder.is_short(prompt):
                self._admit(held, lane, self._encoder.encode_now(prompt))
            else:
                task = asyncio.create_task(self._encode_and_admit(held, lane, prompt), name=f"encode {request.id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception as error:
            self._reject(held, lane, error)

    async def _encode_and_admit(self, held: HeldRequest, lane: Lane, prompt: str | tuple[ChatMessage, ...]) -> None:
        try:
            prompt_ids = await self._encoder.encode(prompt)
            if self._held.is_current(held):
                self._admit(held, lane, prompt_ids)
        except Exception as error:
            if self._held.is_current(held):
                self._reject(held, lane, error)

    def _reject(self, held: HeldRequest, lane: Lane, error: Exception) -> None:
        if isinstance(error, BadRequestError):
            lane.refuse(held, error)
            return
        _log.error("request not admitted", extra={"id": held.request.id}, exc_info=error)
        lane.fail(held, "the worker could not read the request")

    def _check(self, request: Request) -> None:
        if request.model != self._model:
            raise BadRequestError(f"This worker serves {self._model!r}, not {request.model[:64]!r}.", "model")
        if sum(field is not None for field in (request.messages, request.text, request.token_ids)) != 1:
            raise BadRequestError("Give exactly one of messages, text and token_ids.", "prompt")
        self._check_ids(request.token_ids or (), "prompt")
        self._check_ids(request.emitted, "emitted")
        self._check_ids(tuple(request.sampling.logit_bias), "logit_bias")
        self._check_ids(request.sampling.stop_token_ids, "stop_token_ids")

    def _check_ids(self, token_ids: tuple[int, ...], param: str) -> None:
        if not token_ids:
            return
        least, largest = min(token_ids), max(token_ids)
        if least < 0 or largest >= self._tokenizer.vocab_size:
            wrong = least if least < 0 else largest
            limit = self._tokenizer.vocab_size - 1
            raise BadRequestError(
                f"{param}: token id {wrong} is not one of this model's, which are 0 to {limit}.", param
            )

    def _admit(self, held: HeldRequest, lane: Lane, prompt_ids: list[int]) -> None:
        request = held.request
        sequence = self._sequence(held, prompt_ids)
        output = self._tokenizer.output_text(prompt_ids, request.sampling.stop)
        try:
            self._engine.add(sequence)
        except PromptTooLongError as error:
            param = "prompt" if request.messages is None else "messages"
            raise PromptTooLongError(error.num_prompt_tokens, error.max_model_len, param) from None
        except EngineStoppedError:
            lane.give_back(held)
            return
        output.replay(request.emitted)
        held.prelude = self._prelude(request, prompt_ids)
        num_left = sequence.max_tokens - len(request.emitted)
        self._held.admit(held, sequence, output, self._appetite.expected_blocks(sequence.num_tokens, num_left))
        lane.admitted(held)

    def _sequence(self, held: HeldRequest, prompt_ids: list[int]) -> Sequence:
        request = held.request
        now = time.monotonic()
        deadline = None if request.deadline is None else now + request.deadline - time.time()
        max_tokens = request.sampling.max_tokens
        return Sequence(
            id=self._held.next_sequence_id(held),
            token_ids=[*prompt_ids, *request.emitted],
            num_prompt_tokens=len(prompt_ids),
            sampling=request.sampling,
            max_tokens=self._max_model_len if max_tokens is None else max_tokens,
            eos_token_ids=self._eos_token_ids,
            lane=request.lane,
            priority=request.priority,
            arrival=now,
            deadline=deadline,
            salt=request.tenant.encode(),
        )

    def _prelude(self, request: Request, prompt_ids: list[int]) -> Prelude:
        text = ""
        if request.echo:
            text = self._tokenizer.decode(prompt_ids) if request.text is None else request.text
        return Prelude(text, None if request.sampling.prompt_logprobs is None else [None])


def _prompt(request: Request) -> str | tuple[ChatMessage, ...] | list[int]:
    if request.token_ids is not None:
        if not request.token_ids:
            raise BadRequestError("The prompt has no tokens.", "prompt")
        return list(request.token_ids)
    prompt = request.messages if request.text is None else request.text
    assert prompt is not None
    return prompt
