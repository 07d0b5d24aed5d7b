"""GLM 4.5 and later: the name, then keys and values between tags."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Fixed, Name
from shared.formats.parts.tagged_arguments import TaggedArguments, ValueTag

GLM = ChatFormat(
    name="glm",
    marks=(("<arg_key>",),),
    reasoning=ThinkTags(),
    calls=(
        CallForm(
            opens=("<tool_call>",),
            parts=(
                Name(),
                Fixed("\n"),
                TaggedArguments(
                    key_open="<arg_key>",
                    key_close="</arg_key>",
                    value_open=(ValueTag("\n<arg_value>"),),
                    value_close="</arg_value>",
                    separator="\n",
                    end="</tool_call>",
                ),
            ),
            closes=("</tool_call>",),
            between="\n",
        ),
    ),
    tokens=(
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<think>",
        "</think>",
    ),
)
