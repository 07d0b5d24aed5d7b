"""Models that think between tags and know no tools, such as the distilled DeepSeek R1."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import ThinkTags

THINKING = ChatFormat(
    name="thinking",
    marks=(("</think>",),),
    reasoning=ThinkTags(),
    tokens=("<think>", "</think>"),
)
