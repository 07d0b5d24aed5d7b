"""Every operation of the public port: what is sent to it, and what it answers. Each API says so of its own routes."""

from __future__ import annotations

from gateway.anthropic import endpoint as anthropic
from gateway.anthropic.names import ANTHROPIC_NAMES
from gateway.api.operation import Operation
from gateway.api.schemas.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.schemas.openai_names import OPENAI_NAMES
from gateway.llama_cpp import routes as llama_cpp
from gateway.openapi.chat_answers import ChatCompletion, ChatCompletionChunk, Completion
from gateway.openapi.other_answers import (
    DetokenizeAnswer,
    LiveAnswer,
    ModelAnswer,
    ModelList,
    ReadyAnswer,
    TokenizeAnswer,
    VersionAnswer,
)
from gateway.pooling import endpoints as pooling
from gateway.pooling.bodies import POOLED_NAMES
from gateway.responses import operations as responses
from gateway.responses.names import RESPONSE_NAMES

# What becomes of the names in the bodies of each API.
TABLES = (OPENAI_NAMES, RESPONSE_NAMES, POOLED_NAMES, ANTHROPIC_NAMES)


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation.", ChatCompletion, ChatBody, ChatCompletionChunk),
    Operation("post", "/v1/completions", "Continue a text.", Completion, CompletionBody, Completion),
    *responses.OPERATIONS,
    *anthropic.OPERATIONS,
    *pooling.OPERATIONS,
    Operation("get", "/v1/models", "List the models.", ModelList),
    Operation("get", "/v1/models/{model}", "Show one model.", ModelAnswer),
    Operation("post", "/tokenize", "Turn a text or a conversation into token ids.", TokenizeAnswer, TokenizeBody),
    Operation("post", "/detokenize", "Turn token ids into text.", DetokenizeAnswer, DetokenizeBody),
    *llama_cpp.OPERATIONS,
    Operation("get", "/health/live", "Say that the process answers.", LiveAnswer, has_key=False),
    Operation("get", "/health/ready", "Say whether requests can be served.", ReadyAnswer, has_key=False),
    Operation("get", "/health", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("post", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/version", "Say which version this is.", VersionAnswer, has_key=False),
)
