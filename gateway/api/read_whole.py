"""Sink of one choice of a whole chat answer whose text is read."""

from __future__ import annotations

from typing import Any

from gateway.api.answer import Answer
from gateway.api.context_end import context_fields
from gateway.api.logprobs import chat_logprobs
from gateway.api.read_choice import ReadChoice
from gateway.api.tool_calls import call_fields, finish_reason, new_call_id, reasoning_fields
from gateway.generation import Kind, OutputReading
from shared.messages import Finish


class ReadWholeChoice(ReadChoice):
    """Keeps what is read until the choice is told as one object."""

    def __init__(self, answer: Answer, index: int, reading: OutputReading) -> None:
        """Start empty."""
        super().__init__(answer, index, reading)
        self._contents: list[str] = []
        self._reasonings: list[str] = []
        # Name and pieces of the arguments of each call.
        self._calls: list[tuple[str, list[str]]] = []
        self._end: dict[str, str] = {}

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
        """Return the choice as a JSON object. Its content is null where there are only calls."""
        assert kind == "chat"
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
        logprobs = self.take_logprobs()
        return {
            "index": self._index,
            "message": message,
            "logprobs": chat_logprobs(logprobs) if logprobs else None,
            **self._end,
        }
