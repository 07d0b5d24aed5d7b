"""Llama 3 and 4: the answer is a JSON object or, with templates that ask for it, a list of calls as in Python."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm
from shared.formats.parts.fixed import Name
from shared.formats.parts.json_arguments import CallObject
from shared.formats.parts.literal_arguments import LiteralArguments

_ENDS = ("<|eom_id|>", "<|eot_id|>")
_PYTHONIC = (Name(), LiteralArguments(opening="(", assignment="=", true="True", false="False"))

LLAMA_JSON = ChatFormat(
    name="llama-json",
    marks=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')),
    calls=(
        CallForm(
            opens=("<|python_tag|>", "<|python_start|>"),
            bare_opens=("",),
            bare_pattern=r"\s*\{\s*\"(name|parameters|arguments|type|id|index)\"",
            parts=(CallObject("parameters"),),
            separator="; ",
            closes=("<|python_end|>",),
            is_closed_by_end=True,
        ),
    ),
    dropped=_ENDS,
    tokens=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    keeps_special_tokens=True,
)

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
    dropped=_ENDS,
    tokens=("<|python_start|>", "<|python_tag|>", "<|python_end|>"),
    keeps_special_tokens=True,
)
