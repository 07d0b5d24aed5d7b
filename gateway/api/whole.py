"""Whole answers: each choice is a sink that keeps its deltas until all are complete, then one JSON body is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.answer import Answer, ResponseHead
from gateway.api.choice_fields import (
    call_fields,
    chat_logprobs,
    completion_logprobs,
    context_fields,
    finish_reason,
    first_token_name,
    new_call_id,
    reasoning_fields,
)
from gateway.api.chunks import AnswerIdentity
from gateway.api.details import ChoiceDetails, DetailedSink, RankedSink, likeliest
from gateway.api.read_choice import ReadChoice
from gateway.api.usage import usage_fields
from gateway.generation import PLAIN_READING, Generation, Kind, OutputReading
from gateway.http1.exchange import Exchange
from shared.messages import Delta, Finish, TokenLogprob


class WholeChoice(ReadChoice):
    """Keeps what is read until the choice is told as one object."""

    def __init__(self, answer: Answer, index: int, reading: OutputReading) -> None:
        """Start empty."""
        super().__init__(answer, index, reading)
        self._is_plain = reading is PLAIN_READING
        self._contents: list[str] = []
        self._reasonings: list[str] = []
        # Name and pieces of the arguments of each call.
        self._calls: list[tuple[str, list[str]]] = []
        self._has_logprobs = False
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._first_token = ""
        self._end: dict[str, str] = {}

    def deliver(self, delta: Delta) -> None:
        """Keep what is told of the prompt, and read. The first branch is the usual token of a text that is content."""
        if self._is_plain and delta.finish is None and delta.logprobs is None and not delta.prompt_logprobs:
            self._contents.append(delta.text)
            if delta.token_ids:
                self._answer.note_output()
            return
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
            self._first_token = first_token_name(delta)
        self._has_logprobs |= delta.logprobs is not None
        super().deliver(delta)

    def content(self, text: str) -> None:
        """Keep it."""
        self._contents.append(text)

    def reasoning(self, text: str) -> None:
        """Keep it."""
        self._reasonings.append(text)

    def call_started(self, index: int, name: str) -> None:
        """Keep the name."""
        self._calls.append((name, []))

    def call_arguments(self, index: int, text: str) -> None:
        """Keep them."""
        self._calls[index][1].append(text)

    def delivered(self, finish: Finish | None) -> None:
        """Keep why the choice ended."""
        if finish is not None:
            reason = finish_reason(finish.reason, self.num_calls, self._reading.is_function_call)
            self._end = {"finish_reason": reason} | context_fields(finish, self._answer.max_tokens)

    def fields(self, kind: Kind) -> dict[str, Any]:
        """Return the choice as the endpoint's JSON object."""
        logprobs = self.take_logprobs()
        has_logprobs = self._has_logprobs or self._prompt_logprobs
        if kind == "chat":
            told = {"message": self._message(), "logprobs": chat_logprobs(logprobs) if has_logprobs else None}
            return {"index": self._index, **told, **self._end}
        entries: list[TokenLogprob | None] = [*self._prompt_logprobs, *logprobs]
        found = completion_logprobs(entries, 0, self._first_token) if has_logprobs else None
        return {"index": self._index, "text": "".join(self._contents), "logprobs": found, **self._end}

    def _message(self) -> dict[str, Any]:
        """Return the message. Its content is null where there are only calls."""
        content = "".join(self._contents)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls and not content:
            message["content"] = None
        if self._reasonings:
            message |= reasoning_fields("".join(self._reasonings))
        calls = [(name, "".join(arguments)) for name, arguments in self._calls]
        if calls and self._reading.is_function_call:
            message["function_call"] = {"name": calls[0][0], "arguments": calls[0][1]}
        elif calls:
            message["tool_calls"] = [call_fields(new_call_id(), name, arguments) for name, arguments in calls]
        return message


class WholeAnswer(Answer):
    """An answer as one JSON body."""

    def __init__(
        self, exchange: Exchange, generation: Generation, identity: AnswerIdentity, head: ResponseHead
    ) -> None:
        """Prepare one sink per choice."""
        super().__init__(exchange, generation, head)
        self._identity = identity
        reading = generation.reading or PLAIN_READING
        self._choices = [WholeChoice(self, index, reading) for index in range(generation.num_sequences)]
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
