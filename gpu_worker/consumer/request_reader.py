"""What a wire request means for this model: its checks, and the sequence, output and prelude that it becomes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import takewhile

from gpu_worker.consumer.held_request import Prelude
from gpu_worker.core.sequence import Sequence
from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.output_text import OutputText
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage
from shared.errors import BadRequestError
from shared.messages import Request

Prompt = str | tuple[ChatMessage, ...] | list[int]


class RequestReader:
    """Reads requests for one model. Keeps no state of its own."""

    def __init__(self, model: str, directory: ModelDirectory, max_model_len: int, tokenizer: ModelTokenizer) -> None:
        """Read for the model served under the name `model`."""
        self._model = model
        self._eos_token_ids = directory.eos_token_ids
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer

    def prompt(self, request: Request) -> Prompt:
        """Check a request and return its prompt; a list holds token ids.

        Raises:
            BadRequestError: It can never run here.
        """
        if request.model != self._model:
            raise BadRequestError(f"This worker serves {self._model!r}, not {request.model[:64]!r}.", "model")
        if sum(field is not None for field in (request.messages, request.text, request.token_ids)) != 1:
            raise BadRequestError("Give exactly one of messages, text and token_ids.", "prompt")
        self._check_ids(request.emitted, "emitted")
        self._check_ids(request.sampling.logit_bias, "logit_bias")
        self._check_ids(request.sampling.stop_token_ids, "stop_token_ids")
        if request.token_ids is not None:
            if not request.token_ids:
                raise BadRequestError("The prompt has no tokens.", "prompt")
            return list(request.token_ids)
        prompt = request.messages if request.text is None else request.text
        assert prompt is not None
        return prompt

    def sequence(
        self, request: Request, sequence_id: str, prompt_ids: list[int], prediction_ids: list[int]
    ) -> Sequence:
        """Return the sequence of a request, which begins with what earlier attempts have emitted.

        Raises:
            BadRequestError: The tokenizer makes tokens of the prompt that the model does not have.
        """
        self._check_ids(prompt_ids, "prompt" if request.messages is None else "messages")
        now = time.monotonic()
        max_tokens = request.sampling.max_tokens
        return Sequence(
            id=sequence_id,
            token_ids=[*prompt_ids, *request.emitted],
            num_prompt_tokens=len(prompt_ids),
            sampling=request.sampling,
            max_tokens=self._max_model_len if max_tokens is None else max_tokens,
            eos_token_ids=self._eos_token_ids,
            lane=request.lane,
            priority=request.priority,
            arrival=now,
            deadline=None if request.deadline is None else now + request.deadline - time.time(),
            salt=request.tenant.encode(),
            trace=request.trace or "",
            prediction=tuple(self._known(prediction_ids)),
        )

    def output(self, request: Request, prompt_ids: list[int]) -> OutputText:
        """Return the output of a request, as far as it has been delivered."""
        output = self._tokenizer.output_text(prompt_ids, request.sampling.stop)
        # A sequence that is longer than the context gets no more text.
        if len(prompt_ids) + len(request.emitted) <= self._max_model_len:
            output.replay(request.emitted)
        return output

    def prelude(self, request: Request, prompt_ids: list[int]) -> Prelude:
        """Return what goes with the first token."""
        text = ""
        if request.echo:
            text = self._tokenizer.decode(prompt_ids) if request.text is None else request.text
        return Prelude(text, None if request.sampling.prompt_logprobs is None else [None])

    def _known(self, token_ids: list[int]) -> Iterator[int]:
        """Return the tokens up to the first that the model does not have, and so never generates."""
        return takewhile(lambda token_id: token_id < self._tokenizer.vocab_size, token_ids)

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        if not token_ids:
            return
        least, largest = min(token_ids), max(token_ids)
        if least < 0 or largest >= self._tokenizer.vocab_size:
            wrong = least if least < 0 else largest
            limit = self._tokenizer.vocab_size - 1
            raise BadRequestError(
                f"{param}: token id {wrong} is not one of this model's, which are 0 to {limit}.", param
            )
