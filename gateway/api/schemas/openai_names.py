"""The table of the names in bodies of chat completions, text completions, and the tokenizer's endpoints."""

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
from gateway.api.schemas.names import Kind, ParameterTable
from gateway.api.schemas.other_servers import OF_OTHER_SERVERS
from gateway.api.schemas.parameters import StreamOptions
from gateway.api.schemas.structured_output import JsonSchemaBody, ResponseFormatBody, StructuredOutputsBody
from gateway.api.schemas.thinking import ReasoningBody, ThinkingBody
from gateway.api.schemas.tools import FunctionBody, ToolBody
from gateway.api.schemas.unserved_names import UNSERVED, OpenAi

# The struct that reads each object.
_READERS: MappingProxyType[Kind, type[Struct]] = MappingProxyType(
    {
        OpenAi.CHAT: ChatBody,
        OpenAi.COMPLETION: CompletionBody,
        OpenAi.TOKENIZE: TokenizeBody,
        OpenAi.DETOKENIZE: DetokenizeBody,
        OpenAi.STREAM_OPTIONS: StreamOptions,
        OpenAi.MESSAGE: MessageBody,
        OpenAi.CONTENT_PART: ContentPart,
        OpenAi.PREDICTION: PredictionBody,
        OpenAi.CHAT_THINKING: ThinkingBody,
        OpenAi.CHAT_REASONING: ReasoningBody,
        OpenAi.RESPONSE_FORMAT: ResponseFormatBody,
        OpenAi.JSON_SCHEMA: JsonSchemaBody,
        OpenAi.STRUCTURED_OUTPUTS: StructuredOutputsBody,
        OpenAi.TOOL: ToolBody,
        OpenAi.FUNCTION: FunctionBody,
        OpenAi.TOOL_CALL: ToolCallBody,
        OpenAi.CALLED_FUNCTION: CalledFunctionBody,
        OpenAi.CALLED_CUSTOM: CalledCustomBody,
    }
)
OPENAI_NAMES = ParameterTable(_READERS, (*UNSERVED, *OF_OTHER_SERVERS))
