"""Messages in the form that chat templates expect, which differs: what each needs is seen in its source.

The arguments of a call are an object for templates that look into it or write it as JSON, and still the model's own
text where a template adds them to a text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from gpu_worker.text.spelled_tokens import Shield
from shared.conversation import ChatMessage, ToolCall

# Not `reasoning_content is none`, which says nothing of the content.
_CONTENT_IS_NONE = re.compile(r"(?<!\w)content['\"]?\]?\s+is\s+(not\s+)?none\b")
_NINE_CHARACTERS = re.compile(r"length\s*!=\s*9\b")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """What a template expects of its messages.

    Attributes:
        has_null_content: It looks whether a message with calls has no content.
        has_short_ids: Ids of calls must have nine letters or digits (Mistral).
        has_developer: It knows the role `developer`, for others `system`.
        has_parts: It reads a content's parts alone; a text would leave no trace.
        part_roles: Roles of whose contents it reads lists of texts too, which it may treat one by one.
    """

    has_null_content: bool
    has_short_ids: bool
    has_developer: bool
    has_parts: bool = False
    part_roles: frozenset[str] = frozenset()

    @classmethod
    def of(cls, source: str) -> TemplateNeeds:
        """Read them from a template's source."""
        return cls(
            has_null_content=_CONTENT_IS_NONE.search(source) is not None,
            has_short_ids=_NINE_CHARACTERS.search(source) is not None,
            has_developer="developer" in source or "system" not in source,
        )


class CallArguments(dict[str, Any]):
    """The arguments of a call as an object; as a text, they are what the model wrote."""

    def __init__(self, arguments: dict[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._text if isinstance(other, str) else NotImplemented


def template_messages(
    messages: Iterable[ChatMessage], needs: TemplateNeeds, shield: Shield, last_end: str = ""
) -> list[dict[str, Any]]:
    """Return the messages of a conversation as the template needs them, shielded; `last_end` ends the last text."""
    names: dict[str, str] = {}
    fields: list[dict[str, Any]] = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        fields.append(_fields(message, names, needs, shield))
    if last_end and fields:
        last = fields[-1]
        ends = ["content"] if last["content"] else [key for key in _REASONING if key in last]
        for key in ends or ["content"]:
            if isinstance(last[key], list):
                if "text" not in last[key][-1]:
                    last[key] += text_parts("")
                last[key][-1]["text"] += last_end
            else:
                last[key] = (last[key] or "") + last_end
    if needs.has_parts:
        for each in fields:
            if not isinstance(each["content"], list):
                each["content"] = text_parts(each["content"] or "")
    return fields


def text_parts(*texts: str) -> list[dict[str, str]]:
    """Return a content of parts, which are texts."""
    return [{"type": "text", "text": text} for text in texts]


# Names by which templates know an assistant's reasoning.
_REASONING = ("reasoning_content", "reasoning", "thinking")


def _fields(message: ChatMessage, names: dict[str, str], needs: TemplateNeeds, shield: Shield) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not needs.has_developer else message.role
    fields: dict[str, Any] = {"role": shield.text(role), "content": shield.text(message.content)}
    if message.images:
        parts = message.texts_and_images
        fields["content"] = [
            {"type": "image"} if isinstance(part, int) else text_parts(shield.text(part))[0] for part in parts
        ]
    elif message.content and message.part_lengths and (needs.has_parts or role in needs.part_roles):
        fields["content"] = text_parts(*map(shield.text, message.parts))
    name = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = shield.text(_call_id(message.tool_call_id, needs))
        name = name or names.get(message.tool_call_id)
    if name is not None:
        fields["name"] = shield.text(name)
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, needs, shield) for call in message.tool_calls]
        if not message.content and needs.has_null_content:
            fields["content"] = None
    if message.reasoning:
        reasoning = shield.text(message.reasoning)
        fields |= dict.fromkeys(_REASONING, reasoning)
        if message.tool_calls and message.content:
            # gpt-oss refuses a thought beside content before a call: the content is its thought then.
            del fields["thinking"]
    return fields


def _call(call: ToolCall, needs: TemplateNeeds, shield: Shield) -> dict[str, Any]:
    function = {"name": shield.text(call.name), "arguments": _arguments(call.arguments, shield)}
    return {"id": shield.text(_call_id(call.id, needs)), "type": "function", "function": function}


def _arguments(text: str, shield: Shield) -> CallArguments | str:
    try:
        arguments = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return shield.text(text)
    if not isinstance(arguments, dict):
        return shield.text(text)
    return CallArguments(shield.value(arguments), shield.text(text or "{}"))


def _call_id(call_id: str, needs: TemplateNeeds) -> str:
    if not needs.has_short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
