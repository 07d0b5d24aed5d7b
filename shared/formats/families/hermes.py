"""Hermes, Qwen 2.5 and Qwen 3: a JSON object between tags."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.json_arguments import CallObject

_CALLS = (
    CallForm(
        opens=("<tool_call>",),
        begin="\n",
        parts=(CallObject("arguments"),),
        closes=("\n</tool_call>", "</tool_call>"),
        between="\n",
    ),
)
_TOKENS = ("<tool_call>", "</tool_call>")

HERMES = ChatFormat(name="hermes", marks=(("<tool_call>",),), calls=_CALLS, tokens=_TOKENS)

HERMES_THINKING = ChatFormat(
    name="hermes-thinking",
    marks=(("<tool_call>", "</think>"),),
    reasoning=ThinkTags(),
    calls=_CALLS,
    tokens=(*_TOKENS, "<think>", "</think>"),
)
