"""The messages of a conversation as clients write them, and as they travel: contents as text, calls in one form.

Every kind of text part is read; the older `function_call` and the role `function` become calls and results of tools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from gateway.api.schemas.checks import (
    estimate_tokens,
    invalid_value,
    missing_parameter,
    require_text,
    unsupported_parameter,
)
from gateway.api.schemas.images import Images, ImageUrl, MixedContent, image_named
from gateway.api.schemas.names import described
from gateway.errors import ApiError
from gateway.generation import Prompt
from shared.bounds import MAX_MESSAGES, MAX_TOOLS
from shared.conversation import ChatMessage, ChatOptions, ToolCall


@dataclass(slots=True)
class AssistantTurn:
    """The parts of one message, each kind in its order."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added yet."""
        return not (self.content or self.reasoning or self.calls)

    def message(self) -> ChatMessage:
        """Return the message."""
        return ChatMessage(
            role="assistant",
            content="".join(self.content),
            reasoning="".join(self.reasoning) or None,
            tool_calls=tuple(self.calls),
        )


ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_PLAIN_ROLES = frozenset({"system", "developer", "user", "assistant"})

MAX_ARGUMENTS = 1024

# Tokens that a chat template adds around one message.
_TOKENS_PER_MESSAGE = 4
_TEXT_PARTS = ("text", "input_text", "output_text")
_PART_FIELDS = ("text", "refusal", "thinking", "image_url")

_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

Name = Annotated[str, Meta(max_length=256)]


class ThinkingPart(Struct):
    """Text in a part of the type `thinking`, as Mistral's clients write it."""

    text: str


class ContentPart(Struct, forbid_unknown_fields=True):
    """One part of a message's content: text of some kind, or an image."""

    type: Annotated[
        Annotated[str, Meta(max_length=64)],
        described("The form of the part: `text`, `input_text`, `output_text`, `image_url`, `refusal` or `thinking`."),
    ]
    text: Annotated[str | None, described("The text of the part.")] = None
    refusal: Annotated[str | None, described("The text of a part of the type `refusal`.")] = None
    thinking: Annotated[
        str | Annotated[list[ThinkingPart], Meta(max_length=MAX_MESSAGES)] | None,
        described("The text of a part of the type `thinking`, or a list of parts."),
    ] = None
    image_url: Annotated[
        ImageUrl | None,
        described("The image of a part of the type `image_url`, for models that see: an object, or its URL alone."),
    ] = None


Content = str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)]


class CalledFunctionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function an earlier answer called. The arguments are JSON text; some clients send the object itself."""

    name: Annotated[Name, described("The function's name.", "g")]
    arguments: Annotated[
        str | Annotated[dict[Name, Any], Meta(max_length=MAX_ARGUMENTS)] | None,
        described("JSON text of the arguments.", '{"a":1}'),
    ] = None


class CalledCustomBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which tool with free text an earlier answer called, and the text."""

    name: Annotated[Name, described("The tool's name.", "g")]
    input: Annotated[str | None, described("The text that it was given.", "x")] = None


class ToolCallBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One call of an earlier answer."""

    function: Annotated[CalledFunctionBody | None, described("The called function.")] = None
    custom: Annotated[
        CalledCustomBody | None,
        described("The tool of a call of type `custom`; told as a function with the argument `input`."),
    ] = None
    id: Annotated[Name | None, described("Names the call.", "call_2")] = None
    type: Annotated[Name | None, described("`function` or `custom`.")] = None


class MessageBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message as the client wrote it."""

    role: Annotated[
        Annotated[str, Meta(max_length=64)], described("system, developer, user, assistant, tool or function.")
    ]
    content: Annotated[Content | None, described("A text, or a list of parts.")] = None
    name: Annotated[Name | None, described("Name of the speaker.", "Ann")] = None
    refusal: Annotated[str | None, described("Text of an earlier answer that declined.", "no")] = None
    reasoning_content: Annotated[
        Content | None, described("What the model thought before an earlier answer.", "hm")
    ] = None
    reasoning: Annotated[Content | None, described("Another name of `reasoning_content`.", "hm")] = None
    tool_calls: Annotated[
        Annotated[list[ToolCallBody], Meta(max_length=MAX_TOOLS)] | None,
        described("The calls of an earlier answer.", [_CALL]),
    ] = None
    tool_call_id: Annotated[Name | None, described("The call whose result the message is.", "call_1")] = None
    function_call: Annotated[
        CalledFunctionBody | None, described("The older form of `tool_calls`.", _CALL["function"])
    ] = None


_OTHERS = tuple(name for name in MessageBody.__struct_fields__ if name not in ("role", "content"))
_others, _NO_OTHERS = attrgetter(*_OTHERS), (None,) * len(_OTHERS)

MessageBodies = Annotated[list[MessageBody], Meta(min_length=1, max_length=MAX_MESSAGES)]


def flatten_messages(messages: Iterable[MessageBody], images: Images) -> tuple[ChatMessage, ...]:
    """Return the messages as they travel; what they show is added to `images`."""
    flat: list[ChatMessage] = []
    last_function_call: str | None = None
    for index, message in enumerate(messages):
        if _is_plain(message):
            flat.append(ChatMessage(role=message.role, content=cast("str", message.content)))
            continue
        where = f"messages.[{index}]"
        each = _flatten(message, where, images)
        if message.function_call is not None:
            last_function_call = f"call_{index}"
            call = _called(message.function_call, last_function_call, f"{where}.function_call")
            each = msgspec.structs.replace(each, tool_calls=(*each.tool_calls, call))
        if message.role == "function":
            each = msgspec.structs.replace(each, role="tool", tool_call_id=each.tool_call_id or last_function_call)
        flat.append(each)
    return tuple(flat)


def _is_plain(message: MessageBody) -> bool:
    """Whether a message is nothing but a text, as most are."""
    content, is_alone = message.content, _others(message) == _NO_OTHERS
    return type(content) is str and content != "" and "\0" not in content and message.role in _PLAIN_ROLES and is_alone


def conversation_prompt(messages: tuple[ChatMessage, ...], options: ChatOptions | None, images: Images) -> Prompt:
    """Return the prompt of a conversation that shows these images, with an estimate of its tokens."""
    tools = 0 if options is None or options.tools is None else estimate_tokens(options.tools)
    estimate = tools + sum(map(_estimate, messages)) + images.estimated_tokens
    return Prompt(estimate, messages=messages, chat=options, images=tuple(images.sources))


def content_text(content: Content, where: str) -> str:
    """Return a content as text, without its parts that are thinking."""
    return _read(content, where, None)[0].text


def _estimate(message: ChatMessage) -> int:
    calls = sum(estimate_tokens(call.name + call.arguments) for call in message.tool_calls)
    reasoning = estimate_tokens(message.reasoning) if message.reasoning else 0
    return estimate_tokens(message.content) + calls + reasoning + _TOKENS_PER_MESSAGE


def _flatten(message: MessageBody, where: str, images: Images) -> ChatMessage:
    if message.role not in ROLES:
        raise invalid_value(f"{where}.role", f"'{where}.role' must be one of {', '.join(ROLES)}.")
    content, thought = _read(message.content or "", f"{where}.content", images)
    reasoning = _reasoning(message, where) or thought
    calls = tuple(_call(call, f"{where}.tool_calls.[{i}]") for i, call in enumerate(message.tool_calls or ()))
    refusal = require_text(f"{where}.refusal", message.refusal or "")
    # A tool may have no result. An answer may be anything but content, or nothing, where the client stopped it.
    if message.content is None and message.role not in ("assistant", "tool", "function"):
        raise missing_parameter(f"{where}.content", "a string or a list of text parts")
    is_list = isinstance(message.content, list) and not (refusal or thought)
    return ChatMessage(
        role=message.role,
        content="\n".join(filter(None, (content.text, refusal))),
        name=_checked_name(message.name, f"{where}.name"),
        reasoning=reasoning or None,
        tool_calls=calls,
        tool_call_id=_checked_name(message.tool_call_id, f"{where}.tool_call_id"),
        part_lengths=content.part_lengths if is_list or content.shown else (),
        images=tuple(content.shown),
    )


def _reasoning(message: MessageBody, where: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        value: Content | None = getattr(message, name)
        if value:
            return content_text(value, f"{where}.{name}")
    return ""


def _call(call: ToolCallBody, where: str) -> ToolCall:
    if call.type not in (None, "function", "custom"):
        known = "'function' and 'custom' are supported"
        raise unsupported_parameter(where, f"'{where}' is a call of type '{call.type[:64]}'; {known}.")
    call_id = _checked_name(call.id, f"{where}.id") or ""
    if call.type == "custom":
        if call.custom is None:
            raise missing_parameter(f"{where}.custom")
        return _called_custom(call.custom, call_id, f"{where}.custom")
    if call.custom is not None:
        raise invalid_value(f"{where}.custom", f"'{where}.custom' needs the type 'custom' beside it.")
    if call.function is None:
        raise missing_parameter(f"{where}.function")
    return _called(call.function, call_id, f"{where}.function")


def _called_custom(called: CalledCustomBody, call_id: str, where: str) -> ToolCall:
    """Return a call with free text as the call of a function that takes it, as `/v1/responses` reads it too."""
    text = require_text(f"{where}.input", called.input or "")
    arguments = msgspec.json.encode({"input": text}).decode()
    return ToolCall(id=call_id, name=require_text(f"{where}.name", called.name), arguments=arguments)


def _called(function: CalledFunctionBody, call_id: str, where: str) -> ToolCall:
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(
        id=call_id,
        name=require_text(f"{where}.name", function.name),
        arguments=require_text(f"{where}.arguments", arguments or ""),
    )


def _checked_name(name: str | None, where: str) -> str | None:
    return None if name is None else require_text(where, name)


def _read(content: Content, where: str, images: Images | None) -> tuple[MixedContent, str]:
    """Return the texts and images of a content, and the text of its parts that were only thought."""
    if isinstance(content, str):
        return MixedContent(images, texts=[content] if content else []), ""
    mixed = MixedContent(images)
    thoughts: list[str] = []
    for index, part in enumerate(content):
        _check_fields(part, where)
        if part.type == "thinking" and part.thinking is not None:
            thinking = part.thinking
            thoughts += [thinking] if isinstance(thinking, str) else [each.text for each in thinking]
        elif part.type == "refusal" and part.refusal is not None:
            mixed.texts.append(part.refusal)
        elif part.type in _TEXT_PARTS and part.text is not None:
            mixed.texts.append(part.text)
        elif part.type == "image_url" and part.image_url is not None:
            mixed.show(image_named(part.image_url, f"{where}.[{index}].image_url"))
        else:
            raise _unreadable(part, where)
    return mixed, "".join(thoughts)


def _check_fields(part: ContentPart, where: str) -> None:
    """Refuse the text of another type of part: it would be left out in silence."""
    own = "text" if part.type in _TEXT_PARTS else part.type
    for name in _PART_FIELDS if own in _PART_FIELDS else ():
        if name != own and getattr(part, name):
            raise invalid_value(where, f"'{where}' has a part of type '{part.type[:64]}' with '{name}'. Leave it out.")


def _unreadable(part: ContentPart, where: str) -> ApiError:
    field = "text" if part.type in _TEXT_PARTS else part.type
    if field in _PART_FIELDS:
        return invalid_value(where, f"'{where}' has a part of type '{part.type}' without '{field}'.")
    message = f"'{where}' has a part of type '{part.type}'; supported are parts of text and 'image_url'."
    return unsupported_parameter(where, message)
