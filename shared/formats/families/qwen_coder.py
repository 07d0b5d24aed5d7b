"""Qwen 3 Coder and its successors: tags of XML for the function and for each parameter."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Fixed, Name
from shared.formats.parts.tagged_arguments import TaggedArguments, ValueTag

_PARAMETERS = TaggedArguments(
    key_open="<parameter=",
    key_close=">",
    value_open=(ValueTag("\n"),),
    value_close="\n</parameter>",
    separator="\n",
    end="</function>",
)
_FUNCTION = (Name(), Fixed(">\n"), _PARAMETERS, Fixed("</function>"))
_CALLS = (
    CallForm(
        opens=("<tool_call>",),
        begin="\n<function=",
        parts=_FUNCTION,
        closes=("\n</tool_call>", "</tool_call>"),
        between="\n",
    ),
    # The models often forget the outer tag.
    CallForm(opens=("<function=",), parts=_FUNCTION, closes=("</tool_call>",)),
)
_TOKENS = ("<tool_call>", "</tool_call>")

QWEN_CODER = ChatFormat(name="qwen-coder", marks=(("<function=", "<parameter="),), calls=_CALLS, tokens=_TOKENS)

QWEN_CODER_THINKING = ChatFormat(
    name="qwen-coder-thinking",
    marks=(("<function=", "<parameter=", "</think>"),),
    reasoning=ThinkTags(),
    calls=_CALLS,
    tokens=(*_TOKENS, "<think>", "</think>"),
)
