"""The objects that OpenAI's chat and completions have, and those of the tokenizer's endpoints."""

from __future__ import annotations

from gateway.api.schemas.names import Kind, Row, ignored, refused


class OpenAi(Kind):
    """An object in a body of chat completions, text completions, or the tokenizer's endpoints."""

    CHAT = "POST /v1/chat/completions"
    COMPLETION = "POST /v1/completions"
    TOKENIZE = "POST /tokenize"
    DETOKENIZE = "POST /detokenize"
    STREAM_OPTIONS = "stream_options"
    MESSAGE = "A message"
    CONTENT_PART = "A part of a message's content"
    PREDICTION = "prediction"
    CHAT_THINKING = "thinking of /v1/chat/completions and /v1/responses"
    CHAT_REASONING = "reasoning of /v1/chat/completions"
    RESPONSE_FORMAT = "response_format"
    JSON_SCHEMA = "response_format.json_schema"
    STRUCTURED_OUTPUTS = "structured_outputs"
    TOOL = "A tool"
    FUNCTION = "A function that may be called"
    TOOL_CALL = "A call in a message"
    CALLED_FUNCTION = "The function of a call in a message"
    CALLED_CUSTOM = "The custom tool of a call in a message"


GENERATION: tuple[Kind, ...] = (OpenAi.CHAT, OpenAi.COMPLETION)


def harmless(name: str, note: str, example: object, kinds: tuple[Kind, ...] = GENERATION) -> Row:
    """Return the row of a name that changes nothing in either generation."""
    return ignored(name, note, example, *kinds)


def unserved(
    name: str,
    instead: str,
    example: object,
    without_effect: tuple[object, ...] = (),
    kinds: tuple[Kind, ...] = GENERATION,
) -> Row:
    """Return the row of a name that would change either generation and is not served."""
    return refused(name, instead, example, without_effect, *kinds)
