"""A message as one JSON body."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.anthropic.blocks import BlockList
from gateway.anthropic.message import new_message, stop_fields, usage_of
from gateway.api.answer import Answer
from gateway.api.endpoint import Asked
from gateway.api.read_choice import ReadChoice
from gateway.generation import PLAIN_READING, OutputReading
from shared.messages import Finish


class WholeMessage(Answer):
    """An answer as one message."""

    def __init__(self, asked: Asked) -> None:
        """Prepare the only sink."""
        super().__init__(asked.exchange, asked.generation, asked.head)
        self._model = asked.generation.model
        self._choice = _WholeChoice(self, asked.generation.reading or PLAIN_READING)
        self.sinks = [self._choice]

    def _complete(self) -> None:
        message = new_message(self._model) | self._choice.fields() | {"usage": usage_of(self.usage)}
        self._respond(msgspec.json.encode(message))


class _WholeChoice(ReadChoice):
    def __init__(self, answer: Answer, reading: OutputReading) -> None:
        super().__init__(answer, 0, reading)
        self._blocks = BlockList()
        self._finish: Finish | None = None

    def content(self, text: str) -> None:
        self._blocks.text(text)

    def reasoning(self, text: str) -> None:
        self._blocks.thinking(text)

    def call_started(self, index: int, name: str) -> None:
        self._blocks.call(name)

    def call_arguments(self, index: int, text: str) -> None:
        self._blocks.arguments(text)

    def delivered(self, finish: Finish | None) -> None:
        if finish is not None:
            self._finish = finish

    def fields(self) -> dict[str, Any]:
        """Return the content, and why it stopped."""
        assert self._finish is not None, "the answer is complete"
        return {"content": self._blocks.blocks()} | stop_fields(self._finish, self.num_calls, self._answer.max_tokens)
