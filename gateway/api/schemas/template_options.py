"""A client's options for the chat template: variables, documents, tools, a template of its own, how the prompt ends."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, Raw

from gateway.api.schemas.checks import invalid_value, require_text
from gateway.api.schemas.conversation import Name
from gateway.api.schemas.names import described
from gateway.api.schemas.thinking import SWITCHES, Thinking
from shared.conversation import ChatMessage, ChatOptions

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
