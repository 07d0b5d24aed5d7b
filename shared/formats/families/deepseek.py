"""DeepSeek: a section of calls between special tokens. R1 and V3, V3.1, and V3.2 with its tags in the manner of XML."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Fixed, Name
from shared.formats.parts.json_arguments import JsonArguments
from shared.formats.parts.tagged_arguments import TaggedArguments, ValueTag

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_END = "<｜end▁of▁sentence｜>"
_THINK = ("<think>", "</think>")
_TOKENS = (_SECTION, _SECTION_END, _CALL, _CALL_END, _SEPARATOR)

_FENCED = CallForm(
    opens=(_SECTION,),
    parts=(
        Fixed(f"{_CALL}function{_SEPARATOR}"),
        Name(),
        Fixed("\n```json\n"),
        JsonArguments(),
        Fixed(f"\n```{_CALL_END}"),
    ),
    separator="\n",
    closes=(_SECTION_END,),
)
_BARE = CallForm(
    opens=(_SECTION,),
    parts=(Fixed(_CALL), Name(), Fixed(_SEPARATOR), JsonArguments(), Fixed(_CALL_END)),
    separator="",
    closes=(_SECTION_END,),
)

DEEPSEEK_V3 = ChatFormat(
    name="deepseek-v3",
    marks=((_SECTION,),),
    calls=(_FENCED, _BARE),
    dropped=(_END,),
    tokens=_TOKENS,
    keeps_special_tokens=True,
)

DEEPSEEK_R1 = ChatFormat(
    name="deepseek-r1",
    marks=((_SECTION, "</think>"),),
    reasoning=ThinkTags(),
    calls=(_FENCED, _BARE),
    dropped=(_END,),
    tokens=(*_TOKENS, *_THINK),
    keeps_special_tokens=True,
)

DEEPSEEK_V31 = ChatFormat(
    name="deepseek-v3.1",
    marks=((_SECTION, "</think>", "thinking"),),
    reasoning=ThinkTags(),
    calls=(_BARE, _FENCED),
    dropped=(_END,),
    tokens=(*_TOKENS, *_THINK),
    keeps_special_tokens=True,
)

DEEPSEEK_V32 = ChatFormat(
    name="deepseek-v3.2",
    marks=(("｜DSML｜",),),
    reasoning=ThinkTags(),
    calls=(
        CallForm(
            opens=("<｜DSML｜function_calls>",),
            parts=(
                Fixed('\n<｜DSML｜invoke name="'),
                Name(),
                Fixed('">\n'),
                TaggedArguments(
                    key_open='<｜DSML｜parameter name="',
                    key_close='"',
                    value_open=(ValueTag(' string="true">', "string"), ValueTag(' string="false">', "json")),
                    value_close="</｜DSML｜parameter>",
                    separator="\n",
                    end="</｜DSML｜invoke>",
                ),
                Fixed("</｜DSML｜invoke>"),
            ),
            separator="",
            closes=("\n</｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ),
    ),
    dropped=(_END,),
    tokens=_THINK,
    keeps_special_tokens=True,
)
