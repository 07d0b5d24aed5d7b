"""A choice whose text is read: the sink that splits it into content, reasoning and calls for each endpoint's answer.

Endpoints derive from `ReadChoice` and say how each of these looks on their wire.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gateway.api.answer import Answer
from gateway.api.chat_answers import first_token_name
from gateway.errors import ApiError
from gateway.generation import PLAIN_READING, OutputReading
from shared.formats.events import (
    ContentText,
    OutputEvent,
    OutputReader,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from shared.messages import Delta, Finish, TokenLogprob


class ReadChoice(ABC):
    """Sink of one choice. Methods are called in the order of the text; `delivered` ends the calls of one delta.

    Attributes:
        num_calls: Calls of tools that have begun.
        first_token: Name of the first token of an echoed prompt with log probabilities, which has none itself.
    """

    __slots__ = (
        "_answer",
        "_index",
        "_logprobs",
        "_reader",
        "_reading",
        "_reasoning_tokens",
        "_starts_in_reasoning",
        "first_token",
        "num_calls",
    )

    def __init__(self, answer: Answer, index: int, reading: OutputReading) -> None:
        self._answer = answer
        self._index = index
        self._reading = reading
        self._reader: OutputReader | None = None
        self._starts_in_reasoning = False
        self._logprobs: list[TokenLogprob | None] = []
        self.num_calls = 0
        self.first_token = ""

    @abstractmethod
    def content(self, text: str) -> None:
        """Take more of the content."""

    @abstractmethod
    def reasoning(self, text: str) -> None:
        """Take more of the reasoning. Not called where the client does not want it."""

    @abstractmethod
    def call_started(self, index: int, name: str) -> None:
        """Learn that a call of a tool begins; `index` counts the calls from 0."""

    @abstractmethod
    def call_arguments(self, index: int, text: str) -> None:
        """Take more of the JSON text of a call's arguments."""

    @abstractmethod
    def delivered(self, finish: Finish | None) -> None:
        """Send the pieces of the last calls. With `finish` the choice has ended; the answer may end right after."""

    def deliver(self, delta: Delta) -> None:
        """Read a delta."""
        answer = self._answer
        self._starts_in_reasoning |= delta.in_reasoning
        if answer.done.done() or not (delta.token_ids or delta.text or delta.finish):
            return
        if delta.prompt_logprobs:
            self._logprobs += delta.prompt_logprobs
            self.first_token = first_token_name(delta)
        if delta.logprobs:
            self._logprobs += delta.logprobs
        if self._reading is not PLAIN_READING:
            self._tell(self._read(delta))
        elif delta.text:
            self.content(delta.text)
        if answer.first_token_at is None:
            answer.note_output()
        self.delivered(delta.finish)
        if delta.finish is not None:
            answer.finish_choice(self._index, delta.finish)

    def fail(self, error: ApiError) -> None:
        """End the whole answer."""
        self._answer.fail(error)

    def take_logprobs(self) -> list[TokenLogprob | None]:
        """Return the log probabilities of the tokens since the last call, whatever their text belongs to.

        None stands for the first token of an echoed prompt.
        """
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _read(self, delta: Delta) -> list[OutputEvent]:
        reader = self._reader
        if reader is None:
            # The first delta says where the text begins.
            reader = self._reader = self._reading.new_reader(self._starts_in_reasoning)
            self._reasoning_tokens = ReasoningTokens()
        events = reader.feed(delta.text) if delta.text else []
        self._reasoning_tokens.note(len(delta.token_ids), events)
        if delta.finish is not None:
            events = [*events, *reader.finish(is_cut=delta.finish.reason == "length")]
            self._reasoning_tokens.end()
            self._answer.usage.reasoning_tokens += self._reasoning_tokens.count
        return events

    def _tell(self, events: Sequence[OutputEvent]) -> None:
        reading = self._reading
        for event in events:
            match event:
                case ContentText(text):
                    self.content(text)
                case ReasoningText(text):
                    if reading.includes_reasoning:
                        self.reasoning(text)
                case ToolCallStart(index, name):
                    if reading.includes_call(index):
                        self.num_calls += 1
                        self.call_started(index, name)
                case ToolCallArguments(index, text):
                    if reading.includes_call(index):
                        self.call_arguments(index, text)


class ReasoningTokens:
    """Counts the tokens of one choice.

    The marks around reasoning count with it, but for those before a call: most of them are the call's. Where one step
    brought reasoning and something else, its tokens are shared out by the lengths of the texts.

    Attributes:
        count: Tokens of reasoning so far.
    """

    __slots__ = ("_is_reasoning", "_num_unread", "count")

    def __init__(self) -> None:
        self.count = 0
        self._is_reasoning = False
        # Tokens whose text the reader has not told yet, or has dropped.
        self._num_unread = 0

    def note(self, num_tokens: int, events: Sequence[OutputEvent]) -> None:
        """Take in the tokens and events of one step. The first branch is the usual step."""
        if len(events) == 1 and not self._num_unread:
            self._is_reasoning = type(events[0]) is ReasoningText
            if self._is_reasoning:
                self.count += num_tokens
            return
        self._num_unread += num_tokens
        if not events:
            return
        is_behind = self._is_reasoning and not isinstance(events[0], ToolCallStart)
        is_marks = is_behind or isinstance(events[0], ReasoningText)
        num_marks = self._num_unread - num_tokens if is_marks else 0
        num_reasoning = sum(_length(event) for event in events if isinstance(event, ReasoningText))
        if num_reasoning:
            num_marks += round(num_tokens * num_reasoning / sum(map(_length, events)))
        self.count += num_marks
        self._num_unread = 0
        self._is_reasoning = isinstance(events[-1], ReasoningText)

    def end(self) -> None:
        """Count the tokens left unread when the text ended."""
        if self._is_reasoning:
            self.count += self._num_unread
        self._num_unread = 0


def _length(event: OutputEvent) -> int:
    return len(event.name) if isinstance(event, ToolCallStart) else len(event.text)
