"""Whole answers: each choice is a sink that keeps its deltas until all are complete, then one JSON body is sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from gateway.api.answer import Answer, Asked
from gateway.api.chat_answers import (
    CONTEXT_FULL,
    AnswerIdentity,
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    CompletionChoice,
    ToolCallAnswer,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    is_context_full,
    usage_answer,
)
from gateway.api.details import ChoiceDetails, DetailedSink, RankedSink, likeliest
from gateway.api.read_choice import ReadChoice
from gateway.generation import PLAIN_READING, OutputReading
from shared.messages import Delta, Finish


class _WholeChoice(ReadChoice):
    """Collects the content, reasoning and calls of one choice into one object."""

    def __init__(self, answer: Answer, index: int, reading: OutputReading) -> None:
        super().__init__(answer, index, reading)
        self._is_plain = reading is PLAIN_READING
        self._contents: list[str] = []
        self._reasonings: list[str] = []
        # Name and pieces of the arguments of each call.
        self._calls: list[tuple[str, list[str]]] = []
        self._has_logprobs = False
        self._finish: Finish | None = None

    def deliver(self, delta: Delta) -> None:
        """Read a delta. The first branch is the usual token of a text that is content."""
        if self._is_plain and delta.finish is None and delta.logprobs is None and not delta.prompt_logprobs:
            self._contents.append(delta.text)
            if delta.token_ids:
                self._answer.note_output()
            return
        self._has_logprobs |= delta.logprobs is not None or bool(delta.prompt_logprobs)
        super().deliver(delta)

    def content(self, text: str) -> None:
        self._contents.append(text)

    def reasoning(self, text: str) -> None:
        self._reasonings.append(text)

    def call_started(self, index: int, name: str) -> None:
        self._calls.append((name, []))

    def call_arguments(self, index: int, text: str) -> None:
        self._calls[index][1].append(text)

    def delivered(self, finish: Finish | None) -> None:
        self._finish = finish

    def told(self, identity: AnswerIdentity) -> ChatChoice | CompletionChoice:
        """Return the choice in the endpoint's format; it must have ended."""
        finish = self._finish
        assert finish is not None, "the choice has ended"
        reason = finish_reason(finish.reason, self.num_calls, self._reading.is_function_call)
        stop = CONTEXT_FULL if is_context_full(finish, self._answer.max_tokens) else UNSET
        entries = self.take_logprobs() if self._has_logprobs else None
        if identity.kind == "chat":
            logprobs = None if entries is None else chat_logprobs(entries)
            return ChatChoice(self._index, self._message(identity), logprobs, reason, stop)
        found = None if entries is None else completion_logprobs(entries, 0, self.first_token)
        return CompletionChoice(self._index, "".join(self._contents), found, reason, stop)

    def _message(self, identity: AnswerIdentity) -> AssistantMessage:
        content = "".join(self._contents)
        message = AssistantMessage("assistant", None if self._calls and not content else content)
        if self._reasonings:
            message.reasoning_content = message.reasoning = "".join(self._reasonings)
        calls = [CalledFunction(name, "".join(arguments)) for name, arguments in self._calls]
        if calls and self._reading.is_function_call:
            message.function_call = calls[0]
        elif calls:
            message.tool_calls = [
                ToolCallAnswer(identity.call_id(self._index, number), "function", call)
                for number, call in enumerate(calls)
            ]
        return message


class WholeAnswer(Answer):
    """An answer as one JSON body."""

    def __init__(self, asked: Asked, identity: AnswerIdentity) -> None:
        super().__init__(asked)
        generation = asked.generation
        self._identity = identity
        reading = generation.reading or PLAIN_READING
        self._choices = [_WholeChoice(self, index, reading) for index in range(generation.num_sequences)]
        self.sinks = self._choices
        self._details: list[ChoiceDetails] = []
        if generation.details is not None:
            self._details = [ChoiceDetails(generation.details, generation.kind) for _ in self._choices]
            self.sinks = list(map(DetailedSink, self._choices, self._details))
        self._generation = generation
        self._ranked: list[RankedSink] = []
        if generation.ranking is not None:
            shows_logprobs = generation.ranking.shows_logprobs
            self._ranked = [RankedSink(sink, shows_logprobs=shows_logprobs) for sink in self.sinks]
            self.sinks = self._ranked

    def close(self) -> None:
        """Drop references back to the answer."""
        super().close()
        self._choices = []
        self._ranked = []

    def _complete(self) -> None:
        places: Sequence[int] = range(len(self._choices))
        if self._ranked:
            means = [sink.mean_logprob for sink in self._ranked]
            places = likeliest(means, self._generation.n, self._generation.num_choices)
        answer = self._identity.whole([], usage_answer(self.usage))
        for index, place in enumerate(places):
            choice = self._choices[place].told(self._identity)
            choice.index = index
            if self._details:
                self._details[place].report(answer, choice)
            answer.choices.append(choice)  # type: ignore[arg-type]
        self._respond(msgspec.json.encode(answer))
