"""From a pulled request to a sequence in the engine: read, encode, admit, or say why not."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec import structs

from gpu_worker.consumer.constraint_source import CompilerBusyError, ConstraintSource
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests, Prelude, log_fields
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.request_adapters import RequestAdapters
from gpu_worker.consumer.request_images import RequestImages, give
from gpu_worker.consumer.request_reader import Prompt, RequestReader
from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.core.media import MediaSpan, PreparedImage
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine_thread import EngineStoppedError, EngineThread
from gpu_worker.media.prepared_images import ImagesBusyError
from gpu_worker.text.output_text import OutputText
from gpu_worker.text.prompt_encoder import INLINE_TOKENS, TOKEN_CHARACTERS, PromptEncoder, PromptText
from gpu_worker.text.tokenizer import EncodedPrompt
from shared.adapter_calls import ADAPTER_UNAVAILABLE
from shared.adapter_store import AdapterStoreError
from shared.background_tasks import BackgroundTasks
from shared.errors import BadRequestError, PromptTooLongError
from shared.limited_link import LimitedProcessError
from shared.media import IMAGES_BUSY
from shared.media_store import MediaStoreError
from shared.messages import Request

_log = logging.getLogger(__name__)


class Lane(Protocol):
    """What intake tells a lane about a request."""

    async def announce(self, held: HeldRequest) -> bool:
        """Make it known that a request on probation begins, before this worker can die of it; return whether it may."""

    def admitted(self, held: HeldRequest) -> None:
        """The engine has it."""

    def refuse(self, held: HeldRequest, error: BadRequestError) -> None:
        """It can never run."""

    def fail(self, held: HeldRequest, error: str) -> None:
        """Something went wrong here that is not the request's fault."""

    def give_back(self, held: HeldRequest) -> None:
        """It cannot run here any more."""

    def unavailable(self, held: HeldRequest, error: str, code: str) -> None:
        """What it needs cannot be had at the moment, here or elsewhere."""


@dataclass(eq=False)
class Intake:
    """Admits requests to the engine. Adds to the table of held requests what it learns about each.

    `fetch` finds the KV of a prompt of `n` tokens that another worker has computed.
    """

    _reader: RequestReader
    _encoder: PromptEncoder
    _constraints: ConstraintSource
    _engine: EngineThread
    _held: HeldRequests
    _capacity: PullCapacity
    _images: RequestImages | None = None
    _fetch: Callable[[HeldRequest, int], Awaitable[None]] | None = None
    _adapters: RequestAdapters | None = None
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    def leaves_to_others(self, request: Request) -> bool:
        """Whether too many wait here for adapters for this one to wait, too, or its grammar cannot be checked here."""
        is_crowded = self._adapters is not None and self._adapters.is_crowded(request)
        return is_crowded or self._constraints.is_away(request)

    def begin(self, held: HeldRequest, lane: Lane) -> None:
        """Take a request that has just been added to the table towards the engine; a long prompt takes a while."""
        if held.probation:
            self._tasks.spawn(self._announce_and_begin(held, lane), f"announce {held.key}")
        else:
            self._begin(held, lane)

    async def _announce_and_begin(self, held: HeldRequest, lane: Lane) -> None:
        # A tokenizer or a grammar can end the process as well as a kernel: nothing is done with it before.
        try:
            may_begin = await lane.announce(held)
        except Exception as error:
            if self._held.is_current(held):
                self._reject(held, lane, error)
            return
        if may_begin and self._held.is_current(held):
            self._begin(held, lane)

    def _begin(self, held: HeldRequest, lane: Lane) -> None:
        try:
            prompt, prediction = self._reader.prompt(held.request), held.request.prediction
            is_short = isinstance(prompt, list) or self._encoder.is_short(prompt)
            is_plain = not (prediction or held.request.media) and held.request.sampling.grammar is None
            is_plain &= held.request.adapter is None or self._served_adapters().use(held)
            is_plain &= _num_told(held.request, prompt) <= INLINE_TOKENS
            if is_short and is_plain and (self._fetch is None or held.request.ready is None):
                encoded = EncodedPrompt(prompt) if isinstance(prompt, list) else self._encode_now(held, prompt)
                prompt_ids = self._prompt_ids(held, encoded)
                sequence = self._sequence(held, prompt_ids, [], None, [], [])
                self._admit(held, lane, sequence, *self._told(held.request, prompt_ids))
            else:
                encoding = self._encode_and_admit(held, lane, prompt, prediction)
                self._tasks.spawn(encoding, f"encode {held.key}")
        except Exception as error:
            self._reject(held, lane, error)

    async def _encode_and_admit(self, held: HeldRequest, lane: Lane, prompt: Prompt, prediction: str | None) -> None:
        try:
            if held.request.adapter is not None:
                await self._served_adapters().prepare(held)
            if isinstance(prompt, list):
                encoded = EncodedPrompt(prompt)
            else:
                encoded = await self._encode(held, prompt, add_special_tokens=held.request.add_special_tokens)
            prompt_ids = self._prompt_ids(held, encoded)
            prediction_ids: list[int] = []
            if prediction:
                prediction_ids = (await self._encode(held, prediction, add_special_tokens=False)).token_ids
            is_wanted = partial(self._held.is_current, held)
            prompt_ids, spans, images = await self._with_images(held, prompt_ids)
            constraint = await self._constraints.constraint(held.request, is_wanted, in_reasoning=held.in_reasoning)
            if self._fetch is not None:
                await self._fetch(held, len(prompt_ids))
            if not self._held.is_current(held):
                return
            sequence = self._sequence(held, prompt_ids, prediction_ids, constraint, spans, images)
            tell, num_told = partial(self._told, held.request, prompt_ids), _num_told(held.request, prompt_ids)
            if num_told > INLINE_TOKENS:
                size = TOKEN_CHARACTERS * num_told
                told = await self._encoder.prompts.run(held.request.tenant, size, tell, is_wanted)
            else:
                told = tell()
            if self._held.is_current(held):
                self._admit(held, lane, sequence, *told)
        except Exception as error:
            if self._held.is_current(held):
                self._reject(held, lane, error)

    def _served_adapters(self) -> RequestAdapters:
        if self._adapters is None:
            message = "adapter: this worker has no places for adapters; start it with HEADRACE_MAX_LORAS."
            raise BadRequestError(message, "adapter")
        return self._adapters

    def _prompt_ids(self, held: HeldRequest, encoded: EncodedPrompt) -> list[int]:
        """Note where the answer begins, and return the part of the prompt that counts."""
        held.in_reasoning = encoded.in_reasoning
        return self._reader.truncated(held.request, encoded.token_ids)

    def _encode_now(self, held: HeldRequest, prompt: PromptText) -> EncodedPrompt:
        return self._encoder.encode_now(prompt, add_special_tokens=held.request.add_special_tokens)

    async def _encode(self, held: HeldRequest, prompt: PromptText, *, add_special_tokens: bool) -> EncodedPrompt:
        return await self._encoder.encode(
            prompt,
            tenant=held.request.tenant,
            is_wanted=lambda: self._held.is_current(held),
            add_special_tokens=add_special_tokens,
            is_truncated=held.request.truncate_prompt_tokens is not None,
        )

    def _reject(self, held: HeldRequest, lane: Lane, error: Exception) -> None:
        if isinstance(error, BadRequestError):
            lane.refuse(held, error)
            return
        if isinstance(error, AdapterStoreError):
            _log.warning("request cannot have its adapter: %s", error, extra=log_fields(held.request))
            lane.unavailable(held, f"The adapter cannot be loaded at the moment: {error}.", ADAPTER_UNAVAILABLE)
            return
        if isinstance(error, ImagesBusyError):
            lane.unavailable(held, str(error), IMAGES_BUSY)
            return
        if isinstance(error, CompilerBusyError | LimitedProcessError | MediaStoreError):
            _log.warning("request given back: %s", error, extra=log_fields(held.request))
            lane.give_back(held)
            return
        _log.error("request not admitted", extra=log_fields(held.request), exc_info=error)
        lane.fail(held, "the worker could not read the request")

    async def _with_images(
        self, held: HeldRequest, prompt_ids: list[int]
    ) -> tuple[list[int], list[MediaSpan], list[PreparedImage]]:
        """Return the prompt with the tokens of its images, where those are, and the images."""
        if self._images is None or not held.request.media:
            return prompt_ids, [], []
        prompt_ids, spans = self._images.expanded(held.request, prompt_ids)
        return prompt_ids, spans, await self._images.prepared(held.request, partial(self._held.is_current, held))

    def _sequence(
        self,
        held: HeldRequest,
        prompt_ids: list[int],
        prediction_ids: list[int],
        constraint: OutputConstraint | None,
        spans: list[MediaSpan],
        images: list[PreparedImage],
    ) -> Sequence:
        """Return the sequence of a request; `BadRequestError` if the engine can never compute it."""
        request = held.request
        sequence = self._reader.sequence(request, self._held.next_sequence_id(held), prompt_ids, prediction_ids)
        sequence.constraint = constraint
        if spans and images:
            give(sequence, spans, images)
        if held.in_reasoning and (grammar := sequence.sampling.grammar) is not None:
            # The process that computes plans may compile it for itself.
            sequence.sampling = structs.replace(sequence.sampling, grammar=grammar.begun_in_reasoning())
        # A prompt that needs one step may find none beside interactive requests, and others would wait for it.
        if held.is_background and not held.probation:
            sequence.lane = "interactive"
        elif request.lane == "batch" and not sequence.needs_one_step:
            sequence.trial_end = len(sequence.token_ids) + held.probation
        # Before any text is made of the tokens: of a million that takes longer than a worker may be silent.
        try:
            self._engine.validate(sequence)
        except PromptTooLongError as error:
            raise error.naming("prompt" if request.messages is None else "messages") from None
        return sequence

    def _told(self, request: Request, prompt_ids: list[int]) -> tuple[OutputText, Prelude]:
        """Return what the client has been told, and what goes with the first token. Any thread may do so."""
        return self._reader.output(request, prompt_ids), self._reader.prelude(request, prompt_ids)

    def _admit(self, held: HeldRequest, lane: Lane, sequence: Sequence, output: OutputText, prelude: Prelude) -> None:
        num_left = sequence.max_tokens - len(held.request.emitted)
        held.prelude = prelude
        try:
            self._engine.add(sequence)
        except EngineStoppedError:
            lane.give_back(held)
            return
        num_blocks = self._capacity.expected_blocks(sequence.num_tokens, num_left, sequence.budget)
        self._held.admit(held, sequence, output, num_blocks)
        lane.admitted(held)


def _num_told(request: Request, prompt: Prompt) -> int:
    """Return how many tokens become text before a request is admitted, as far as that is known."""
    return len(request.emitted) + (len(prompt) if request.echo and isinstance(prompt, list) else 0)
