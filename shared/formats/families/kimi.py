"""Kimi K2: a section of calls between special tokens, each with an id that begins with the name."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Fixed, Name, Skipped
from shared.formats.parts.json_arguments import JsonArguments

_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

_CALLS = (
    CallForm(
        opens=(_SECTION,),
        parts=(
            Fixed(f"{_CALL}functions."),
            Name(),
            Skipped(":0", _ARGUMENTS),
            JsonArguments(),
            Fixed(_CALL_END),
        ),
        separator="",
        closes=(_SECTION_END,),
    ),
)
_TOKENS = (_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS)

KIMI = ChatFormat(name="kimi", marks=((_SECTION,),), calls=_CALLS, tokens=_TOKENS, keeps_special_tokens=True)

KIMI_THINKING = ChatFormat(
    name="kimi-thinking",
    marks=((_SECTION, "</think>"),),
    reasoning=ThinkTags(),
    calls=_CALLS,
    tokens=(*_TOKENS, "<think>", "</think>"),
    keeps_special_tokens=True,
)
