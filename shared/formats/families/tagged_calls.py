"""Families that write each argument between tags: GLM, Qwen 3 Coder, MiniMax and DeepSeek V3.2."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import THINK_TOKENS, CallForm, ThinkTags
from shared.formats.parts.fixed import Fixed, Name
from shared.formats.parts.tagged_arguments import TaggedArguments, ValueTag

# GLM 4.5 and later: the name, then keys and values between tags.
_GLM_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
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
                    end="</tool_call>",
                ),
            ),
            closes=("</tool_call>",),
            between="\n",
        ),
    ),
    tokens=(*_GLM_TAGS, *THINK_TOKENS),
)

# Qwen 3 Coder and its successors: tags of XML for the function and for each parameter.
_QWEN_PARAMETERS = TaggedArguments(
    key_open="<parameter=",
    key_close=">",
    value_open=(ValueTag("\n"),),
    value_close="\n</parameter>",
    end="</function>",
)
_QWEN_FUNCTION = (Name(), Fixed(">\n"), _QWEN_PARAMETERS, Fixed("</function>"))
_QWEN_CALLS = (
    CallForm(
        opens=("<tool_call>",),
        begin="\n<function=",
        parts=_QWEN_FUNCTION,
        closes=("\n</tool_call>", "</tool_call>"),
        between="\n",
    ),
    # The models often forget the outer tag.
    CallForm(opens=("<function=",), parts=_QWEN_FUNCTION, closes=("</tool_call>",)),
)

QWEN_CODER = ChatFormat(
    name="qwen-coder", marks=(("<function=", "<parameter="),), calls=_QWEN_CALLS, tokens=("<tool_call>", "</tool_call>")
)

QWEN_CODER_THINKING = QWEN_CODER.thinking()

# MiniMax M2: tags of XML with the names as attributes.
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
                    end="</invoke>",
                ),
                Fixed("</invoke>"),
            ),
            separator="",
            closes=("\n</minimax:tool_call>", "</minimax:tool_call>"),
        ),
    ),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>", *THINK_TOKENS),
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
                    end="</｜DSML｜invoke>",
                ),
                Fixed("</｜DSML｜invoke>"),
            ),
            separator="",
            closes=("\n</｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ),
    ),
    dropped=("<｜end▁of▁sentence｜>",),
    tokens=THINK_TOKENS,
    keeps_special_tokens=True,
)
