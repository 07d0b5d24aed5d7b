"""Gemma: since Gemma 4, and in FunctionGemma, an object with bare keys and its own quotation marks."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Name
from shared.formats.parts.literal_arguments import LiteralArguments

GEMMA = ChatFormat(
    name="gemma",
    marks=(("<|tool_call>",),),
    reasoning=ThinkTags(opens=("<|channel>thought\n", "<|channel>thought"), closes=("<channel|>",)),
    calls=(
        CallForm(
            opens=("<|tool_call>",),
            begin="call:",
            parts=(Name(), LiteralArguments(opening="{", assignment=":", raw_quote='<|"|>')),
            closes=("<tool_call|>",),
        ),
    ),
    dropped=("<turn|>", "<|tool_response>"),
    tokens=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    keeps_special_tokens=True,
)

FUNCTION_GEMMA = ChatFormat(
    name="function-gemma",
    marks=(("<start_function_call>",),),
    calls=(
        CallForm(
            opens=("<start_function_call>",),
            begin="call:",
            parts=(Name(), LiteralArguments(opening="{", assignment=":", raw_quote="<escape>")),
            closes=("<end_function_call>",),
        ),
    ),
    dropped=("<end_of_turn>", "<start_function_response>"),
    tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    keeps_special_tokens=True,
)
