"""The parameters that are served: the fields of the structs that read bodies."""

from __future__ import annotations

from types import MappingProxyType

from msgspec import Struct

from gateway.api.schemas.bodies import ChatBody, CompletionBody, DetokenizeBody, PredictionBody, TokenizeBody
from gateway.api.schemas.conversation import (
    CalledCustomBody,
    CalledFunctionBody,
    ContentPart,
    MessageBody,
    ToolCallBody,
)
from gateway.api.schemas.described import rows_of
from gateway.api.schemas.parameters import StreamOptions
from gateway.api.schemas.row import Kind
from gateway.api.schemas.structured_output import JsonSchemaBody, ResponseFormatBody, StructuredOutputsBody
from gateway.api.schemas.thinking import ReasoningBody, ThinkingBody
from gateway.api.schemas.tools import FunctionBody, ToolBody

# The struct that reads each object.
READERS: MappingProxyType[Kind, type[Struct]] = MappingProxyType(
    {
        Kind.CHAT: ChatBody,
        Kind.COMPLETION: CompletionBody,
        Kind.TOKENIZE: TokenizeBody,
        Kind.DETOKENIZE: DetokenizeBody,
        Kind.STREAM_OPTIONS: StreamOptions,
        Kind.MESSAGE: MessageBody,
        Kind.CONTENT_PART: ContentPart,
        Kind.PREDICTION: PredictionBody,
        Kind.CHAT_THINKING: ThinkingBody,
        Kind.CHAT_REASONING: ReasoningBody,
        Kind.RESPONSE_FORMAT: ResponseFormatBody,
        Kind.JSON_SCHEMA: JsonSchemaBody,
        Kind.STRUCTURED_OUTPUTS: StructuredOutputsBody,
        Kind.TOOL: ToolBody,
        Kind.FUNCTION: FunctionBody,
        Kind.TOOL_CALL: ToolCallBody,
        Kind.CALLED_FUNCTION: CalledFunctionBody,
        Kind.CALLED_CUSTOM: CalledCustomBody,
    }
)
_KINDS = {struct: kind for kind, struct in READERS.items()}

SERVED = tuple(row for kind, struct in READERS.items() for row in rows_of(struct, kind, _KINDS))
