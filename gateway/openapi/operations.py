"""Every operation of the public port: what is sent to it, and what it answers. Each API says so of its own routes."""

from __future__ import annotations

from gateway.anthropic import endpoint as anthropic
from gateway.anthropic.names import ANTHROPIC_NAMES
from gateway.api import chat_answers as chat
from gateway.api import route_answers as shared
from gateway.api.schemas.openai_names import OPENAI_NAMES
from gateway.llama_cpp import routes as llama_cpp
from gateway.pooling import endpoints as pooling
from gateway.pooling.bodies import POOLED_NAMES
from gateway.responses import operations as responses
from gateway.responses.names import RESPONSE_NAMES

# What becomes of the names in the bodies of each API.
TABLES = (OPENAI_NAMES, RESPONSE_NAMES, POOLED_NAMES, ANTHROPIC_NAMES)


OPERATIONS = (
    *chat.OPERATIONS,
    *responses.OPERATIONS,
    *anthropic.OPERATIONS,
    *pooling.OPERATIONS,
    *shared.OPERATIONS,
    *llama_cpp.OPERATIONS,
)
