"""How model families write reasoning and tool calls: one description each, its reader and its grammar."""

from shared.formats.chat_format import ChatFormat
from shared.formats.events import (
    ContentText,
    OutputEvent,
    OutputReader,
    PlainReader,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from shared.formats.lark_text import with_marker_tokens
from shared.formats.registry import detect_format, format_named, format_names
from shared.formats.tools import Tool, ToolChoice, ToolSchemaError

__all__ = [
    "ChatFormat",
    "ContentText",
    "OutputEvent",
    "OutputReader",
    "PlainReader",
    "ReasoningText",
    "Tool",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolChoice",
    "ToolSchemaError",
    "detect_format",
    "format_named",
    "format_names",
    "with_marker_tokens",
]
