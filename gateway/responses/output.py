"""The items of a response while the model writes them, and the events that report them.

One item is open at a time. Text goes on in a message, thoughts in a reasoning item, and each call of a tool is an item.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from gateway.responses.draft import ResponseDraft
from gateway.responses.items import output_item_id
from gateway.responses.reasoning_seal import Seal

Fields = dict[str, Any]


EventSink = Callable[[str, Fields], None]
"""Takes the type of an event and the fields that it has of its own."""


def no_events(kind: str, fields: Fields) -> None:
    """Drop the event."""


class ResponseOutput:
    """The output of one response; `items` are the finished ones, as JSON objects."""

    def __init__(self, draft: ResponseDraft, emit: EventSink = no_events, seal: Seal | None = None) -> None:
        self._draft = draft
        self._seal = seal if draft.has_encrypted_reasoning else None
        self._emit = emit
        self._open: _OpenItem | None = None
        self.items: list[Fields] = []

    def content(self, text: str, logprobs: list[Fields] | None = None) -> None:
        """Take more of the answer itself."""
        (self._open if isinstance(self._open, _Message) else self._begin(_Message)).add(text, logprobs)

    def reasoning(self, text: str) -> None:
        """Take more of the model's reasoning."""
        kind = _Summary if self._draft.has_summary else _Reasoning
        (self._open if isinstance(self._open, _Reasoning) else self._begin(kind)).add(text)

    def call_started(self, name: str) -> None:
        """Take the begin of a call."""
        origin = self._draft.namespaced_names.get(name)
        self._begin(_Call, *((name, None) if origin is None else (origin.name, origin.namespace)))

    def call_arguments(self, text: str) -> None:
        """Take more of the arguments of the call that began last."""
        assert isinstance(self._open, _Call), "arguments follow the start of their call"
        self._open.add(text)

    def close(self) -> None:
        """Tell of no more events."""
        self._emit = no_events
        if self._open is not None:
            self._open.emit = no_events

    def finish(self, *, is_complete: bool = True) -> None:
        """End the open item. An answer without anything has an empty message."""
        if self._open is None and not self.items:
            self._begin(_Message)
        self._end("completed" if is_complete else "incomplete")

    def _begin(self, kind: type[_OpenItem], name: str = "", namespace: str | None = None) -> _OpenItem:
        self._end("completed")
        index = len(self.items)
        item_id = output_item_id(kind.prefix, self._draft.id, index)
        self._open = kind(item_id, index, self._emit, name)
        self._open.seal, self._open.namespace = self._seal, namespace
        self._open.begin()
        return self._open

    def _end(self, status: str) -> None:
        if self._open is not None:
            self.items.append(self._open.end(status))
            self._open = None


class CompactionOutput(ResponseOutput):
    """The output of a response that summarizes its conversation: one item with all of the text, if there is any.

    What the model thinks, and what it calls although nothing is offered to it, is not part of a summary.
    """

    def __init__(self, draft: ResponseDraft, emit: EventSink = no_events, seal: Seal | None = None) -> None:
        super().__init__(draft, emit)
        self._seal = seal

    def content(self, text: str, logprobs: list[Fields] | None = None) -> None:
        """Take more of the summary."""
        if self._open is not None or text.strip():
            (self._open or self._begin(_Compaction)).add(text)

    def reasoning(self, text: str) -> None:
        """Leave it out."""

    def call_started(self, name: str) -> None:
        """Leave it out."""

    def call_arguments(self, text: str) -> None:
        """Leave them out."""

    def finish(self, *, is_complete: bool = True) -> None:
        """End the item."""
        self._end("completed" if is_complete else "incomplete")


class _OpenItem(ABC):
    prefix: str
    seal: Seal | None = None
    namespace: str | None = None

    def __init__(self, item_id: str, index: int, emit: EventSink, name: str) -> None:
        self._id = item_id
        self._index = index
        self.emit = emit
        self._name = name
        self._texts: list[str] = []
        self._logprobs: list[Fields] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> None:
        self.emit("response.output_item.added", {"output_index": self._index, "item": self.fields("in_progress")})

    @abstractmethod
    def add(self, text: str, logprobs: list[Fields] | None = None) -> None:
        """Take more of the item's text."""

    def end(self, status: str) -> Fields:
        fields = self.fields(status)
        self.emit("response.output_item.done", {"output_index": self._index, "item": fields})
        return fields

    @abstractmethod
    def fields(self, status: str) -> Fields:
        """Return the item as JSON."""

    def _place(self) -> Fields:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class _Message(_OpenItem):
    prefix = "msg"

    def begin(self) -> None:
        super().begin()
        self.emit("response.content_part.added", self._place() | {"part": self._part("")})

    def add(self, text: str, logprobs: list[Fields] | None = None) -> None:
        self._texts.append(text)
        self._logprobs += logprobs or ()
        self.emit("response.output_text.delta", self._place() | {"delta": text, "logprobs": logprobs or []})

    def end(self, status: str) -> Fields:
        text, place = self._text, self._place()
        self.emit("response.output_text.done", place | {"text": text, "logprobs": self._logprobs})
        self.emit("response.content_part.done", place | {"part": self._part(text)})
        return super().end(status)

    def fields(self, status: str) -> Fields:
        content = [] if status == "in_progress" else [self._part(self._text)]
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> Fields:
        return {"type": "output_text", "annotations": [], "logprobs": self._logprobs, "text": text}


class _Reasoning(_OpenItem):
    """What the model thinks, as it is. Its attributes name where it stands: in fields of the item, and in events."""

    prefix = "rs"
    list_name = "content"
    part_type = "reasoning_text"
    part_event = "response.content_part"
    text_event = "response.reasoning_text"

    def begin(self) -> None:
        super().begin()
        self.emit(f"{self.part_event}.added", self._place() | {"part": self._part("")})

    def add(self, text: str, logprobs: list[Fields] | None = None) -> None:
        self._texts.append(text)
        self.emit(f"{self.text_event}.delta", self._place() | {"delta": text})

    def end(self, status: str) -> Fields:
        text, place = self._text, self._place()
        self.emit(f"{self.text_event}.done", place | {"text": text})
        self.emit(f"{self.part_event}.done", place | {"part": self._part(text)})
        return super().end(status)

    def fields(self, status: str) -> Fields:
        is_open = status == "in_progress"
        sealed = None if is_open or self.seal is None else self.seal("reasoning", self._id, self._text)
        texts: dict[str, list[Fields]] = {"summary": [], "content": []}
        if not is_open:
            texts[self.list_name] = [self._part(self._text)]
        return {"id": self._id, "type": "reasoning", "status": status, **texts, "encrypted_content": sealed}

    def _part(self, text: str) -> Fields:
        return {"type": self.part_type, "text": text}


class _Summary(_Reasoning):
    """The same text, not shortened, in the place of summaries, for clients that show these alone."""

    list_name = "summary"
    part_type = "summary_text"
    part_event = "response.reasoning_summary_part"
    text_event = "response.reasoning_summary_text"

    def _place(self) -> Fields:
        return {"item_id": self._id, "output_index": self._index, "summary_index": 0}


class _Compaction(_OpenItem):
    """A summary of the conversation. Its events say that it grows, and nothing of the text, which clients only keep."""

    prefix = "cmp"

    def add(self, text: str, logprobs: list[Fields] | None = None) -> None:
        self._texts.append(text)
        self.emit("response.compaction.compacting", {"item_id": self._id, "output_index": self._index})

    def fields(self, status: str) -> Fields:
        assert self.seal is not None, "a request for a summary is refused where nothing encrypts it"
        sealed = "" if status == "in_progress" else self.seal("compaction", self._id, self._text)
        return {"id": self._id, "type": "compaction", "encrypted_content": sealed}


class _Call(_OpenItem):
    prefix = "fc"

    def add(self, text: str, logprobs: list[Fields] | None = None) -> None:
        self._texts.append(text)
        place = {"item_id": self._id, "output_index": self._index}
        self.emit("response.function_call_arguments.delta", place | {"delta": text})

    def end(self, status: str) -> Fields:
        place = {"item_id": self._id, "output_index": self._index, "name": self._name}
        self.emit("response.function_call_arguments.done", place | {"arguments": self._text})
        return super().end(status)

    def fields(self, status: str) -> Fields:
        fields = {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": f"call_{self._id.removeprefix('fc_')}",
            "name": self._name,
            "arguments": "" if status == "in_progress" else self._text,
        }
        return fields if self.namespace is None else fields | {"namespace": self.namespace}
