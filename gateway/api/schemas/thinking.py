"""Thinking, and a client's other options for the chat template: tools, variables, and how the prompt ends.

Whether to think, and how much, is said in the forms of several servers, which all become `Thinking`.
Sources: `enable_thinking` of Alibaba's DashScope and of Qwen's templates; `thinking` of DeepSeek's, Z.ai's and
Volcengine's APIs; `reasoning` of OpenRouter's; `think` of Ollama's; `reasoning_effort` of OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.api.schemas.checks import invalid_value, require_text
from gateway.api.schemas.conversation import Name
from gateway.api.schemas.names import described
from gateway.api.schemas.parameters import CommonBody
from shared.conversation import ChatMessage, ChatOptions

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

T = TypeVar("T")

# Switches of templates, which a client may name in `chat_template_kwargs` too.
SWITCHES = ("enable_thinking", "thinking")
_VALUES = {b"true": True, b"false": False}


class ThinkingBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks. `auto` and `adaptive` leave it to the template."""

    type: Annotated[
        Literal["enabled", "disabled", "auto", "adaptive"],
        described("`enabled`, `disabled`, or `auto` and `adaptive`, which leave it to the template."),
    ]


class ReasoningBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks, how much, and whether the client gets to read it."""

    enabled: Annotated[bool | None, described("Think, or do not.", True)] = None
    effort: Annotated[ReasoningEffort | None, described("Another place of `reasoning_effort`.", "low")] = None
    exclude: Annotated[bool | None, described("True: leave the reasoning out of the answer.", True)] = None


class ThinkingFields(CommonBody, kw_only=True):
    """Fields of a body of chat completions. None always means: left out."""

    reasoning_effort: Annotated[
        ReasoningEffort | None, described("How much to think: `none` to `max`, where the template knows it.", "high")
    ] = None
    enable_thinking: Annotated[bool | None, described("Think, or do not, where the template knows it.", False)] = None
    thinking: Annotated[
        ThinkingBody | bool | None, described("Another form of `enable_thinking`.", {"type": "disabled"})
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None,
        described("Another form of `enable_thinking`, or of `reasoning_effort`.", True),
    ] = None
    reasoning: Annotated[
        ReasoningBody | None, described("Another form of `enable_thinking` and `reasoning_effort`.", {"enabled": True})
    ] = None
    include_reasoning: Annotated[bool | None, described("False: leave the reasoning out of the answer.", False)] = None


_forms = attrgetter("reasoning_effort", "enable_thinking", "thinking", "think", "reasoning", "include_reasoning")


class Thinking(Struct, frozen=True):
    """The thinking that a body asks for. None leaves it to the template.

    Attributes:
        is_on: Whether to think.
        effort: How much; `none` also turns `is_on` off.
        is_included: Whether the client gets the reasoning.
    """

    is_on: bool | None = None
    effort: ReasoningEffort | None = None
    is_included: bool = True


def chat_thinking(body: ThinkingFields, named: dict[str, Raw] | None) -> Thinking:
    """Return the thinking that a chat body asks for in any of the forms; see `asked_thinking`."""
    if _forms(body) == (None,) * 6:
        return Thinking()
    reasoning = body.reasoning or ReasoningBody()
    level = body.think if isinstance(body.think, str) else None
    switches = {
        "enable_thinking": body.enable_thinking,
        "thinking": switch(body.thinking),
        "reasoning.enabled": reasoning.enabled,
        "think": None if isinstance(body.think, str) else body.think,
    }
    efforts: dict[str, ReasoningEffort | None] = {
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": reasoning.effort,
        "think": level,
    }
    included = agreed(
        {
            "include_reasoning": body.include_reasoning,
            "reasoning.exclude": None if reasoning.exclude is None else not reasoning.exclude,
        }
    )
    return msgspec.structs.replace(asked_thinking(switches, efforts, named), is_included=included is not False)


def asked_thinking(
    switches: Mapping[str, bool | None],
    efforts: Mapping[str, ReasoningEffort | None],
    named: dict[str, Raw] | None,
) -> Thinking:
    """Return the thinking that a body asks for.

    The mappings are by the place in the body that says it; `named` are the variables that the client names itself.
    """
    effort: ReasoningEffort | None = agreed(efforts)
    by_effort = {name: value != "none" for name, value in efforts.items() if value is not None}
    if all(value is None for value in switches.values()):
        # An effort beside a switch that the client names for the template is weaker than that.
        return Thinking(agreed(by_effort), effort)
    return Thinking(agreed({**switches, **by_effort, **named_switches(named)}), effort)


def switch(thinking: ThinkingBody | bool | None) -> bool | None:
    """Return whether `thinking` turns thinking on; None leaves it to the template."""
    if isinstance(thinking, ThinkingBody):
        return {"enabled": True, "disabled": False}.get(thinking.type)
    return thinking


def named_switches(named: dict[str, Raw] | None) -> dict[str, bool | None]:
    """Return the switches among the variables that a client names for the template, by their place in the body."""
    return {f"chat_template_kwargs.{name}": _VALUES.get(bytes((named or {}).get(name, b""))) for name in SWITCHES}


def agreed(values: Mapping[str, T | None]) -> T | None:
    """Return the one value that these fields have; None where none has one."""
    given = [(name, value) for name, value in values.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            message = f"'{name}' contradicts '{given[0][0]}'. Give one of them, or the same value."
            raise invalid_value(name, message)
    return given[0][1] if given else None


MAX_TEMPLATE_CHARACTERS = 64 << 10
MAX_VARIABLES = 64
MAX_VARIABLE_BYTES = 64 << 10
MAX_DOCUMENTS = 1024

# Names that have a parameter of their own, or are not for clients.
_RESERVED = frozenset(
    ["messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "return_dict"]
)
_FALSE = b"false"

Verbosity = Literal["low", "medium", "high"]
Variables = Annotated[dict[Name, Raw], Meta(max_length=MAX_VARIABLES)]
Documents = Annotated[list[Annotated[dict[Name, Raw], Meta(max_length=MAX_VARIABLES)]], Meta(max_length=MAX_DOCUMENTS)]

# Fields of chat completions and of `/tokenize`.
GenerationPrompt = Annotated[bool | None, described("Open the assistant's turn at the end.", False)]
Continuation = Annotated[bool | None, described("The answer goes on after the last message.")]
OwnTemplate = Annotated[
    Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS)] | None,
    described("A template to use; only where the operator allows it.", "x"),
]
OwnVariables = Annotated[Variables | None, described("Variables of the template.", {"enable_thinking": False})]


class TemplateBody(Protocol):
    """The fields that chat completions and `/tokenize` have in common. None always means: left out."""

    add_generation_prompt: GenerationPrompt
    continue_final_message: Continuation
    chat_template: OwnTemplate
    chat_template_kwargs: OwnVariables


def template_variables(
    named: Variables | None,
    thinking: Thinking = Thinking(),  # noqa: B008
    documents: Documents | None = None,
    verbosity: Verbosity | None = None,
) -> dict[str, Raw]:
    """Return the variables of the template.

    Templates know the effort by different names: a scale, or a switch that is on or off. One that knows no verbosity
    does not look at it. What the client names itself is stronger.
    """
    variables: dict[str, Raw] = {}
    if thinking.is_on is not None:
        is_on = Raw(b"true" if thinking.is_on else _FALSE)
        variables |= dict.fromkeys(SWITCHES, is_on)
    if thinking.effort not in (None, "none"):
        variables["reasoning_effort"] = Raw(msgspec.json.encode(thinking.effort))
    if verbosity is not None:
        variables["verbosity"] = Raw(msgspec.json.encode(verbosity))
    if documents:
        variables["documents"] = Raw(msgspec.json.encode(documents))
    for name in named or ():
        if name in _RESERVED:
            message = f"'chat_template_kwargs' must not have '{name}': it is a parameter of its own."
            raise invalid_value(f"chat_template_kwargs.{name}", message)
    if named and len(msgspec.json.encode(named)) > MAX_VARIABLE_BYTES:
        raise invalid_value(
            "chat_template_kwargs", f"'chat_template_kwargs' must be at most {MAX_VARIABLE_BYTES} bytes."
        )
    return variables | (named or {})


def may_reason(variables: dict[str, Raw]) -> bool:
    """Whether the variables leave the model's reasoning on."""
    return not variables or all(bytes(variables.get(name, b"")) != _FALSE for name in SWITCHES)


def chat_options(
    body: TemplateBody, messages: tuple[ChatMessage, ...], tools: str | None, variables: dict[str, Raw]
) -> ChatOptions | None:
    """Return the template's options besides the messages; None if there are none."""
    continues = bool(body.continue_final_message)
    if continues:
        _check_continued(body, messages[-1])
    options = ChatOptions(
        tools=tools,
        variables=msgspec.json.encode(variables).decode() if variables else None,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        template=None if body.chat_template is None else require_text("chat_template", body.chat_template),
    )
    return None if options == ChatOptions() else options


def _check_continued(body: TemplateBody, last: ChatMessage) -> None:
    if body.add_generation_prompt:
        message = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
        raise invalid_value("continue_final_message", message)
    if last.role != "assistant" or last.tool_calls or not (last.content or last.reasoning):
        message = "'continue_final_message' needs a last message of the assistant, with content and without calls."
        raise invalid_value("continue_final_message", message)
