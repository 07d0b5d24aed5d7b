"""Families that write arguments as literals: as in Python (Llama, LFM), or as objects with bare keys (Gemma)."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Name
from shared.formats.parts.literal_arguments import LiteralArguments

_PYTHONIC = (Name(), LiteralArguments(opening="(", assignment="=", true="True", false="False"))

# Llama 3 and 4 with templates that ask for it: a list of calls as in Python.
LLAMA_PYTHONIC = ChatFormat(
    name="llama-pythonic",
    marks=(("func_name1(params_name1=",),),
    calls=(
        CallForm(
            opens=("<|python_start|>", "<|python_tag|>"),
            begin="[",
            bare_opens=("",),
            bare_pattern=r"\s*\[\s*[A-Za-z_][A-Za-z0-9_.]*\(",
            parts=_PYTHONIC,
            separator=", ",
            closes=("]", "]<|python_end|>"),
        ),
    ),
    dropped=("<|eom_id|>", "<|eot_id|>"),
    tokens=("<|python_start|>", "<|python_tag|>", "<|python_end|>"),
    keeps_special_tokens=True,
)

# LFM 2: such a list between special tokens.
LFM = ChatFormat(
    name="lfm",
    marks=(("<|tool_call_start|>",),),
    calls=(
        CallForm(
            opens=("<|tool_call_start|>",),
            begin="[",
            parts=_PYTHONIC,
            separator=", ",
            closes=("]<|tool_call_end|>", "]"),
        ),
    ),
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    keeps_special_tokens=True,
)

# Gemma: since Gemma 4, and in FunctionGemma, an object with bare keys and its own quotation marks.
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
