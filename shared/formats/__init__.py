"""How model families write reasoning and tool calls: one description each, its reader and its grammar.

Here are all formats by name, and which of them a chat template speaks.
"""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat as ChatFormat
from shared.formats.description import THINK_TOKENS, ThinkTags
from shared.formats.events import ContentText as ContentText
from shared.formats.events import OutputEvent as OutputEvent
from shared.formats.events import OutputReader as OutputReader
from shared.formats.events import PlainReader as PlainReader
from shared.formats.events import ReasoningText as ReasoningText
from shared.formats.events import ToolCallArguments as ToolCallArguments
from shared.formats.events import ToolCallStart as ToolCallStart
from shared.formats.families import json_calls, literal_calls, tagged_calls
from shared.formats.lark_text import with_marker_tokens as with_marker_tokens
from shared.formats.tools import Tool as Tool
from shared.formats.tools import ToolChoice as ToolChoice
from shared.formats.tools import ToolSchemaError as ToolSchemaError

# Models that think between tags and know no tools, such as the distilled DeepSeek R1.
THINKING = ChatFormat(name="thinking", marks=(("</think>",),), reasoning=ThinkTags(), tokens=THINK_TOKENS)
# All text is content.
PLAIN = ChatFormat(name="plain")

# A template speaks the first that it has all marks of, so one with more marks stands before one with fewer.
_FORMATS = (
    json_calls.HARMONY,
    tagged_calls.GLM,
    tagged_calls.QWEN_CODER_THINKING,
    tagged_calls.QWEN_CODER,
    tagged_calls.DEEPSEEK_V32,
    json_calls.DEEPSEEK_V31,
    json_calls.DEEPSEEK_R1,
    json_calls.DEEPSEEK_V3,
    json_calls.KIMI_THINKING,
    json_calls.KIMI,
    tagged_calls.MINIMAX,
    literal_calls.LFM,
    json_calls.MISTRAL_THINKING,
    json_calls.MISTRAL,
    json_calls.MISTRAL_LIST,
    literal_calls.GEMMA,
    literal_calls.FUNCTION_GEMMA,
    literal_calls.LLAMA_PYTHONIC,
    json_calls.LLAMA_JSON,
    json_calls.HERMES_THINKING,
    json_calls.HERMES,
    THINKING,
    PLAIN,
)
_BY_NAME = {each.name: each for each in _FORMATS}


def format_names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(_BY_NAME)


def format_named(name: str) -> ChatFormat:
    """Return a format by its name; the plain one for a name that is empty or unknown."""
    return _BY_NAME.get(name, PLAIN)


def detect_format(template: str | None) -> str:
    """Return the name of the format that a chat template speaks, by the markers in its text."""
    spoken = (each for each in _FORMATS if each.is_spoken_by(template or ""))
    return next(spoken, PLAIN).name
