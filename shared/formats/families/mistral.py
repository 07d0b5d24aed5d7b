"""Mistral: a list of JSON objects behind one marker, and since 2025 a marker, the name and the arguments each."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import MaybeSkipped, Name
from shared.formats.parts.json_arguments import CallObject, JsonArguments

_LIST = CallForm(
    opens=("[TOOL_CALLS]",),
    begin="[",
    parts=(CallObject("arguments"),),
    separator=", ",
    closes=("]",),
)
_NAMED = CallForm(opens=("[TOOL_CALLS]",), parts=(Name(), MaybeSkipped("[CALL_ID]", "[ARGS]"), JsonArguments()))
_TOKENS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

MISTRAL_LIST = ChatFormat(
    name="mistral-list",
    marks=(("[TOOL_CALLS]",),),
    calls=(_LIST, _NAMED),
    tokens=_TOKENS,
    keeps_special_tokens=True,
)

MISTRAL = ChatFormat(
    name="mistral",
    marks=(("[TOOL_CALLS]", "[ARGS]"),),
    calls=(_NAMED, _LIST),
    tokens=_TOKENS,
    keeps_special_tokens=True,
)

MISTRAL_THINKING = ChatFormat(
    name="mistral-thinking",
    marks=(("[TOOL_CALLS]", "[THINK]"),),
    reasoning=ThinkTags(opens=("[THINK]",), closes=("[/THINK]",)),
    calls=(_NAMED, _LIST),
    tokens=(*_TOKENS, "[THINK]", "[/THINK]"),
    keeps_special_tokens=True,
)
