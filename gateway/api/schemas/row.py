"""A row of the table of parameters: what becomes of one name that a client may write."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Use(enum.Enum):
    """What becomes of a parameter."""

    SERVED = "served"
    IGNORED = "ignored"
    REFUSED = "refused"


class Kind(enum.Enum):
    """A JSON object that clients write. The value names it in the documentation."""

    CHAT = "POST /v1/chat/completions"
    COMPLETION = "POST /v1/completions"
    RESPONSE = "POST /v1/responses"
    RESPONSE_ITEM = "An item of the input of /v1/responses"
    RESPONSE_PART = "A part of an item of /v1/responses"
    RESPONSE_REASONING = "reasoning of /v1/responses"
    RESPONSE_TEXT = "text of /v1/responses"
    TEXT_FORMAT = "text.format of /v1/responses"
    EMBEDDINGS = "POST /v1/embeddings"
    RERANK = "POST /v1/rerank"
    SCORE = "POST /v1/score"
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
    DOCUMENT = "A document of /v1/rerank"
    ANTHROPIC_MESSAGES = "POST /v1/messages"
    COUNT_TOKENS = "POST /v1/messages/count_tokens"
    TURN = "A message of /v1/messages"
    BLOCK = "A block of a message of /v1/messages"
    SOURCE = "The source of a block of /v1/messages"
    OUTPUT_CONFIG = "output_config of /v1/messages"
    THINKING = "thinking of /v1/messages"
    TOOL = "A tool"
    FUNCTION = "A function that may be called"
    TOOL_CALL = "A call in a message"
    CALLED_FUNCTION = "The function of a call in a message"
    CALLED_CUSTOM = "The custom tool of a call in a message"


GENERATION = (Kind.CHAT, Kind.COMPLETION)


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one name.

    Attributes:
        name: As the client writes it.
        kinds: The objects in which it stands.
        note: Served: what it does. Ignored: why it changes nothing. Refused: what to do instead.
        example: A value that a client would send; the tests send it. None for what every body has.
        without_effect: Refused: values that mean the same as leaving it out, and pass. Null always does.
        holds: The kind of object, or of the objects in a list, that is its value.
        use: What becomes of it.
    """

    name: str
    kinds: tuple[Kind, ...]
    note: str
    example: object = None
    without_effect: tuple[object, ...] = ()
    holds: Kind | None = None
    use: Use = field(default=Use.SERVED, kw_only=True)


def ignored(name: str, note: str, example: object, kinds: tuple[Kind, ...] = GENERATION) -> Row:
    """Return the row of a name that changes nothing."""
    return Row(name, kinds, note, example, use=Use.IGNORED)


def refused(
    name: str,
    instead: str,
    example: object,
    without_effect: tuple[object, ...] = (),
    kinds: tuple[Kind, ...] = GENERATION,
) -> Row:
    """Return the row of a name that would change the answer and is not served."""
    return Row(name, kinds, instead, example, without_effect, use=Use.REFUSED)
