"""Whole answers: each choice is a sink that keeps its deltas until all are complete, then one JSON body is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.answer import Answer, ResponseHead
from gateway.api.context_end import context_fields
from gateway.api.details import ChoiceDetails, DetailedSink
from gateway.api.identity import AnswerIdentity
from gateway.api.logprobs import chat_logprobs, completion_logprobs, first_token_name
from gateway.api.ranking import RankedSink, likeliest
from gateway.api.read_whole import ReadWholeChoice
from gateway.api.usage import usage_fields
from gateway.errors import ApiError
from gateway.generation import Generation, Kind
from gateway.http1.exchange import Exchange
from shared.messages import Delta, TokenLogprob


class WholeChoice:
    """Sink of one choice: text, log probabilities and finish reason, in pieces."""

    __slots__ = ("_answer", "_end", "_first_token", "_index", "_logprobs", "_prompt_logprobs", "_texts")

    def __init__(self, answer: WholeAnswer, index: int) -> None:
        """Start empty."""
        self._answer = answer
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._first_token = ""
        self._end: dict[str, str] = {}

    def deliver(self, delta: Delta) -> None:
        """Keep what is new."""
        if delta.text:
            self._texts.append(delta.text)
        if delta.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *delta.logprobs]
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
            self._first_token = first_token_name(delta)
        if delta.token_ids:
            self._answer.note_output()
        if delta.finish is not None:
            more = context_fields(delta.finish, self._answer.max_tokens)
            self._end = {"finish_reason": delta.finish.reason} | more
            self._answer.note_output()
            self._answer.finish_choice(self._index, delta.finish)

    def fail(self, error: ApiError) -> None:
        """End the whole answer."""
        self._answer.fail(error)

    def fields(self, kind: Kind) -> dict[str, Any]:
        """Return the choice as the endpoint's JSON object."""
        text = "".join(self._texts)
        has_logprobs = self._logprobs is not None or self._prompt_logprobs
        if kind == "chat":
            message = {"role": "assistant", "content": text, "refusal": None}
            logprobs = chat_logprobs(self._logprobs or ()) if has_logprobs else None
            return {"index": self._index, "message": message, "logprobs": logprobs} | self._end
        entries: list[TokenLogprob | None] = [*self._prompt_logprobs, *(self._logprobs or ())]
        logprobs = completion_logprobs(entries, 0, self._first_token) if has_logprobs else None
        return {"index": self._index, "text": text, "logprobs": logprobs} | self._end


class WholeAnswer(Answer):
    """An answer as one JSON body."""

    def __init__(
        self, exchange: Exchange, generation: Generation, identity: AnswerIdentity, head: ResponseHead
    ) -> None:
        """Prepare one sink per choice."""
        super().__init__(exchange, generation, head)
        self._identity = identity
        reading = generation.reading
        self._choices: list[WholeChoice | ReadWholeChoice] = [
            WholeChoice(self, index) if reading is None else ReadWholeChoice(self, index, reading)
            for index in range(generation.num_sequences)
        ]
        self.sinks = self._choices
        self._details: list[ChoiceDetails] = []
        wanted = generation.details
        if wanted is not None:
            self._details = [ChoiceDetails(wanted, generation.kind) for _ in self._choices]
            pairs = zip(self._choices, self._details, strict=True)
            self.sinks = [DetailedSink(choice, details, wanted) for choice, details in pairs]
        self._generation = generation
        self._ranked: list[RankedSink] = []
        ranking = generation.ranking
        if ranking is not None:
            self._ranked = [RankedSink(sink, shows_logprobs=ranking.shows_logprobs) for sink in self.sinks]
            self.sinks = self._ranked

    def close(self) -> None:
        """Let go of what refers back to the answer."""
        super().close()
        self._choices = []
        self._ranked = []

    def _returned_places(self) -> Sequence[int]:
        """Return the places of the choices that are returned, in the order of the answer."""
        if not self._ranked:
            return range(len(self._choices))
        means = [sink.mean_logprob for sink in self._ranked]
        return likeliest(means, self._generation.n, self._generation.num_choices)

    def _complete(self) -> None:
        choices: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        for index, place in enumerate(self._returned_places()):
            choices.append(self._choices[place].fields(self._identity.kind) | {"index": index})
            if self._details:
                choices[-1] |= self._details[place].take_choice_fields()
                # Each of several choices of one prompt reports the same of it.
                more = more or self._details[place].take_answer_fields()
        body = self._identity.fields(streamed=False) | {"choices": choices, "usage": usage_fields(self.usage)} | more
        self._respond(msgspec.json.encode(body))
