"""How model families write reasoning and tool calls: one description each, its reader and its grammar."""

from shared.formats.chat_format import ChatFormat as ChatFormat
from shared.formats.events import ContentText as ContentText
from shared.formats.events import OutputEvent as OutputEvent
from shared.formats.events import OutputReader as OutputReader
from shared.formats.events import PlainReader as PlainReader
from shared.formats.events import ReasoningText as ReasoningText
from shared.formats.events import ToolCallArguments as ToolCallArguments
from shared.formats.events import ToolCallStart as ToolCallStart
from shared.formats.lark_text import with_marker_tokens as with_marker_tokens
from shared.formats.registry import detect_format as detect_format
from shared.formats.registry import format_named as format_named
from shared.formats.registry import format_names as format_names
from shared.formats.tools import Tool as Tool
from shared.formats.tools import ToolChoice as ToolChoice
from shared.formats.tools import ToolSchemaError as ToolSchemaError
