"""LFM 2: a list of calls as in Python between special tokens."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm
from shared.formats.parts.fixed import Name
from shared.formats.parts.literal_arguments import LiteralArguments

LFM = ChatFormat(
    name="lfm",
    marks=(("<|tool_call_start|>",),),
    calls=(
        CallForm(
            opens=("<|tool_call_start|>",),
            begin="[",
            parts=(Name(), LiteralArguments(opening="(", assignment="=", true="True", false="False")),
            separator=", ",
            closes=("]<|tool_call_end|>", "]"),
        ),
    ),
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    keeps_special_tokens=True,
)
