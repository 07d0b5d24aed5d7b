"""Every operation of the public port: what is sent to it, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from gateway.anthropic.body import CountTokensBody, MessagesBody
from gateway.anthropic.names import ANTHROPIC_NAMES
from gateway.api.schemas.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.schemas.openai_names import OPENAI_NAMES
from gateway.llama_cpp.infill import InfillBody
from gateway.openapi.chat_answers import ChatCompletion, ChatCompletionChunk, Completion
from gateway.openapi.other_answers import (
    AnthropicError,
    AnthropicEvent,
    AnthropicMessage,
    DetokenizeAnswer,
    ErrorAnswer,
    InfillAnswer,
    LiveAnswer,
    ModelAnswer,
    ModelList,
    PromptAnswer,
    PropsAnswer,
    ReadyAnswer,
    TokenCount,
    TokenizeAnswer,
    VersionAnswer,
)
from gateway.openapi.pooling_answers import EmbeddingList, RankedIndex, Ranking, ScoreList
from gateway.openapi.response_answers import (
    CompactedConversation,
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    ResponseAnswer,
    ResponseEvent,
)
from gateway.pooling.bodies import POOLED_NAMES, EmbeddingsBody, RerankBody, ScoreBody
from gateway.responses.body import ResponseBody
from gateway.responses.names import RESPONSE_NAMES

# What becomes of the names in the bodies of each API.
TABLES = (OPENAI_NAMES, RESPONSE_NAMES, POOLED_NAMES, ANTHROPIC_NAMES)


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        answer: Of status 200, as JSON: a struct, or a union of types.
        event: The data of each event, where the answer may be streamed.
        error: Of any other status.
        has_key: Only those who have a key may call it.
    """

    method: str
    path: str
    summary: str
    answer: Any
    body: type[Struct] | None = None
    event: type[Struct] | None = None
    error: type[Struct] = ErrorAnswer
    has_key: bool = True


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation.", ChatCompletion, ChatBody, ChatCompletionChunk),
    Operation("post", "/v1/completions", "Continue a text.", Completion, CompletionBody, Completion),
    Operation(
        "post", "/v1/responses", "Answer a conversation and keep it.", ResponseAnswer, ResponseBody, ResponseEvent
    ),
    Operation("post", "/v1/responses/input_tokens", "Count the tokens of a prompt.", InputTokenCount, ResponseBody),
    Operation("post", "/v1/responses/compact", "Summarize a conversation.", CompactedConversation, ResponseBody),
    Operation("get", "/v1/responses/{response_id}", "Show a response.", ResponseAnswer, event=ResponseEvent),
    Operation("delete", "/v1/responses/{response_id}", "Forget a response.", DeletedResponse),
    Operation("post", "/v1/responses/{response_id}/cancel", "Stop a background response.", ResponseAnswer),
    Operation("get", "/v1/responses/{response_id}/input_items", "List what a response was asked.", InputItemList),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, in Anthropic's form.",
        AnthropicMessage,
        MessagesBody,
        AnthropicEvent,
        AnthropicError,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        TokenCount,
        CountTokensBody,
        error=AnthropicError,
    ),
    Operation("post", "/v1/embeddings", "Make vectors of texts.", EmbeddingList, EmbeddingsBody),
    Operation("post", "/v1/rerank", "Rank documents for a query.", Ranking | list[RankedIndex], RerankBody),
    Operation("post", "/v1/score", "Score texts for queries.", ScoreList, ScoreBody),
    Operation("get", "/v1/models", "List the models.", ModelList),
    Operation("get", "/v1/models/{model}", "Show one model.", ModelAnswer),
    Operation("post", "/tokenize", "Turn a text or a conversation into token ids.", TokenizeAnswer, TokenizeBody),
    Operation("post", "/detokenize", "Turn token ids into text.", DetokenizeAnswer, DetokenizeBody),
    Operation("post", "/apply-template", "Show the prompt of a conversation.", PromptAnswer, TokenizeBody),
    Operation("post", "/infill", "Fill in text before a suffix.", InfillAnswer, InfillBody, InfillAnswer),
    Operation("get", "/props", "Describe a model, as llama.cpp's server does.", PropsAnswer),
    Operation("get", "/health/live", "Say that the process answers.", LiveAnswer, has_key=False),
    Operation("get", "/health/ready", "Say whether requests can be served.", ReadyAnswer, has_key=False),
    Operation("get", "/health", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("post", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/version", "Say which version this is.", VersionAnswer, has_key=False),
)
