"""All formats by name, and which of them a chat template speaks."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import THINK_TOKENS, ThinkTags
from shared.formats.families.json_calls import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HARMONY,
    HERMES,
    HERMES_THINKING,
    KIMI,
    KIMI_THINKING,
    LLAMA_JSON,
    MISTRAL,
    MISTRAL_LIST,
    MISTRAL_THINKING,
)
from shared.formats.families.literal_calls import FUNCTION_GEMMA, GEMMA, LFM, LLAMA_PYTHONIC
from shared.formats.families.tagged_calls import DEEPSEEK_V32, GLM, MINIMAX, QWEN_CODER, QWEN_CODER_THINKING

# Models that think between tags and know no tools, such as the distilled DeepSeek R1.
THINKING = ChatFormat(name="thinking", marks=(("</think>",),), reasoning=ThinkTags(), tokens=THINK_TOKENS)
# All text is content.
PLAIN = ChatFormat(name="plain")

# A template speaks the first that it has all marks of, so one with more marks stands before one with fewer.
_FORMATS = (
    HARMONY,
    GLM,
    QWEN_CODER_THINKING,
    QWEN_CODER,
    DEEPSEEK_V32,
    DEEPSEEK_V31,
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    KIMI_THINKING,
    KIMI,
    MINIMAX,
    LFM,
    MISTRAL_THINKING,
    MISTRAL,
    MISTRAL_LIST,
    GEMMA,
    FUNCTION_GEMMA,
    LLAMA_PYTHONIC,
    LLAMA_JSON,
    HERMES_THINKING,
    HERMES,
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
