"""MiniMax M2: tags of XML with the names as attributes."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Fixed, Name
from shared.formats.parts.tagged_arguments import TaggedArguments, ValueTag

MINIMAX = ChatFormat(
    name="minimax",
    marks=(("minimax:tool_call",),),
    reasoning=ThinkTags(),
    calls=(
        CallForm(
            opens=("<minimax:tool_call>",),
            parts=(
                Fixed('\n<invoke name="'),
                Name(),
                Fixed('">\n'),
                TaggedArguments(
                    key_open='<parameter name="',
                    key_close='">',
                    value_open=(ValueTag(""),),
                    value_close="</parameter>",
                    separator="\n",
                    end="</invoke>",
                ),
                Fixed("</invoke>"),
            ),
            separator="",
            closes=("\n</minimax:tool_call>", "</minimax:tool_call>"),
        ),
    ),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
)
