"""Whether the model thinks, and how much: the forms of several servers, which all become `Thinking`.

Sources: `enable_thinking` of Alibaba's DashScope and of Qwen's templates; `thinking` of DeepSeek's, Z.ai's and
Volcengine's APIs; `reasoning` of OpenRouter's; `think` of Ollama's; `reasoning_effort` of OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from gateway.api.schemas.checks import invalid_value
from gateway.api.schemas.names import described
from gateway.api.schemas.parameters import CommonBody

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
