"""Families that write arguments as JSON: Hermes and Qwen, DeepSeek, Kimi, Mistral, Llama and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Fixed, MaybeSkipped, Name, Skipped
from shared.formats.parts.json_arguments import CallObject, JsonArguments

# Hermes, Qwen 2.5 and Qwen 3: a JSON object between tags.
_HERMES_CALLS = (
    CallForm(
        opens=("<tool_call>",),
        begin="\n",
        parts=(CallObject("arguments"),),
        closes=("\n</tool_call>", "</tool_call>"),
        between="\n",
    ),
)
_HERMES_TOKENS = ("<tool_call>", "</tool_call>")

HERMES = ChatFormat(name="hermes", marks=(("<tool_call>",),), calls=_HERMES_CALLS, tokens=_HERMES_TOKENS)

HERMES_THINKING = HERMES.thinking()

# DeepSeek R1, V3 and V3.1: a section of calls between special tokens.
_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_SECTION_END = "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_END = "<｜end▁of▁sentence｜>"
_DEEPSEEK_TOKENS = (_DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END, _DEEPSEEK_CALL, _DEEPSEEK_CALL_END, _DEEPSEEK_SEPARATOR)

_DEEPSEEK_FENCED = CallForm(
    opens=(_DEEPSEEK_SECTION,),
    parts=(
        Fixed(f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}"),
        Name(),
        Fixed("\n```json\n"),
        JsonArguments(),
        Fixed(f"\n```{_DEEPSEEK_CALL_END}"),
    ),
    separator="\n",
    closes=(_DEEPSEEK_SECTION_END,),
)
_DEEPSEEK_BARE = CallForm(
    opens=(_DEEPSEEK_SECTION,),
    parts=(Fixed(_DEEPSEEK_CALL), Name(), Fixed(_DEEPSEEK_SEPARATOR), JsonArguments(), Fixed(_DEEPSEEK_CALL_END)),
    separator="",
    closes=(_DEEPSEEK_SECTION_END,),
)

DEEPSEEK_V3 = ChatFormat(
    name="deepseek-v3",
    marks=((_DEEPSEEK_SECTION,),),
    calls=(_DEEPSEEK_FENCED, _DEEPSEEK_BARE),
    dropped=(_DEEPSEEK_END,),
    tokens=_DEEPSEEK_TOKENS,
    keeps_special_tokens=True,
)

DEEPSEEK_R1 = DEEPSEEK_V3.thinking(name="deepseek-r1")

DEEPSEEK_V31 = DEEPSEEK_V3.thinking(
    name="deepseek-v3.1",
    marks=((_DEEPSEEK_SECTION, "</think>", "thinking"),),
    calls=(_DEEPSEEK_BARE, _DEEPSEEK_FENCED),
)

# Kimi K2: a section of calls between special tokens, each with an id that begins with the name.
_KIMI_CALL, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_SECTION, _KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

_KIMI_CALLS = (
    CallForm(
        opens=(_KIMI_SECTION,),
        parts=(
            Fixed(f"{_KIMI_CALL}functions."),
            Name(),
            Skipped(":0", _KIMI_ARGUMENTS),
            JsonArguments(),
            Fixed(_KIMI_CALL_END),
        ),
        separator="",
        closes=(_KIMI_SECTION_END,),
    ),
)
_KIMI_TOKENS = (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS)

KIMI = ChatFormat(
    name="kimi", marks=((_KIMI_SECTION,),), calls=_KIMI_CALLS, tokens=_KIMI_TOKENS, keeps_special_tokens=True
)

KIMI_THINKING = KIMI.thinking()

# Mistral: a list of JSON objects behind one marker, and since 2025 a marker, the name and the arguments each.
_MISTRAL_LIST = CallForm(
    opens=("[TOOL_CALLS]",),
    begin="[",
    parts=(CallObject("arguments"),),
    separator=", ",
    closes=("]",),
)
_MISTRAL_NAMED = CallForm(opens=("[TOOL_CALLS]",), parts=(Name(), MaybeSkipped("[CALL_ID]", "[ARGS]"), JsonArguments()))
_MISTRAL_TOKENS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

MISTRAL = ChatFormat(
    name="mistral",
    marks=(("[TOOL_CALLS]", "[ARGS]"),),
    calls=(_MISTRAL_NAMED, _MISTRAL_LIST),
    tokens=_MISTRAL_TOKENS,
    keeps_special_tokens=True,
)

MISTRAL_LIST = replace(MISTRAL, name="mistral-list", marks=(("[TOOL_CALLS]",),), calls=(_MISTRAL_LIST, _MISTRAL_NAMED))

MISTRAL_THINKING = replace(
    MISTRAL,
    name="mistral-thinking",
    marks=(("[TOOL_CALLS]", "[THINK]"),),
    reasoning=ThinkTags(opens=("[THINK]",), closes=("[/THINK]",)),
    tokens=(*_MISTRAL_TOKENS, "[THINK]", "[/THINK]"),
)

# Llama 3 and 4: the answer is a JSON object.
_LLAMA_ENDS = ("<|eom_id|>", "<|eot_id|>")

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
    dropped=_LLAMA_ENDS,
    tokens=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    keeps_special_tokens=True,
)

# gpt-oss: messages in channels. Analysis is reasoning, commentary to a function is a call, the rest is content.
_HARMONY_FINAL = "<|channel|>final<|message|>"
_HARMONY_TURN = "<|start|>assistant"
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")

_HARMONY_PARTS = (Name(), Skipped(" <|constrain|>json", "<|message|>"), JsonArguments())
_HARMONY_RECIPIENTS = ("<|channel|>commentary to=", "<|channel|>analysis to=", "<|start|>assistant to=")


def _harmony_calls(namespace: str) -> CallForm:
    return CallForm(
        opens=tuple(f"{each}{namespace}" for each in _HARMONY_RECIPIENTS),
        # The prompt ends with the beginning of the turn, and the recipient may stand before the channel.
        bare_opens=(f"to={namespace}",),
        parts=_HARMONY_PARTS,
        closes=("<|call|>", "<|end|>"),
        is_closed_by_end=True,
    )


HARMONY = ChatFormat(
    name="harmony",
    marks=(("<|channel|>", "<|message|>"),),
    reasoning=ThinkTags(
        opens=("<|channel|>analysis<|message|>",),
        closes=("<|end|>", "<|return|>", _HARMONY_FINAL, "<|channel|>commentary<|message|>"),
        behind=_HARMONY_TURN,
        is_anywhere=True,
    ),
    # The tools that the client offers are functions. Others are those that the model was trained with, as its browser.
    calls=(_harmony_calls("functions."), _harmony_calls("")),
    content_open=_HARMONY_FINAL,
    dropped=(
        _HARMONY_FINAL,
        "<|channel|>commentary<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        _HARMONY_TURN,
        *_HARMONY_ENDS,
    ),
    tokens=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
    keeps_special_tokens=True,
)
