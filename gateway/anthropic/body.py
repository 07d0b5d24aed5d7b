"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, as clients write them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.api.schemas.model_name import ModelName
from gateway.api.schemas.sampling_fields import StopText
from gateway.api.schemas.template_options import OwnVariables
from gateway.api.schemas.tools import Parameters
from shared.bounds import (
    MAX_MESSAGES,
    MAX_OUTPUT_TOKENS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOOLS,
    Probability,
)

ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+\Z")]


class SourceBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a document's content stands; only text in the body itself is read."""

    type: Annotated[str, Meta(max_length=64)]
    data: str | None = None
    media_type: Annotated[str, Meta(max_length=256)] | None = None

    content: str | Blocks | None = None

    # Of the types that are not read; with these, the error names the type.
    url: Raw | UnsetType = UNSET
    file_id: Raw | UnsetType = UNSET


class BlockBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One block of a message: text, thinking, the use of a tool, its result, a document or a result of a search."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    id: Annotated[str, Meta(max_length=256)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    input: Raw | UnsetType = UNSET
    tool_use_id: Annotated[str, Meta(max_length=256)] | None = None
    content: str | Blocks | None = None
    is_error: bool | None = None
    # Of a document, where it stands; of a result of a search, what it is a result from.
    source: SourceBody | Annotated[str, Meta(max_length=8192)] | None = None
    title: Annotated[str, Meta(max_length=1024)] | None = None
    context: str | None = None


Blocks = Annotated[list[BlockBody], Meta(max_length=MAX_MESSAGES)]


class MessageBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ToolBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may use. Types other than `custom` name tools that Anthropic has defined."""

    name: ToolName | None = None
    type: Annotated[str, Meta(max_length=64)] | None = None
    description: str | None = None
    input_schema: Parameters | None = None
    strict: bool | None = None

    # Read by Anthropic's servers, and without meaning here: prompts are always cached, and tools run at the client.
    cache_control: Raw | UnsetType = UNSET
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: Raw | UnsetType = UNSET
    input_examples: Raw | UnsetType = UNSET

    # Of Anthropic's text editor: what its client shows of a file.
    max_characters: Annotated[int, Meta(ge=1)] | None = None

    # Of tools that are not served; with these, the error names the type.
    max_uses: Raw | UnsetType = UNSET
    allowed_domains: Raw | UnsetType = UNSET
    blocked_domains: Raw | UnsetType = UNSET
    user_location: Raw | UnsetType = UNSET
    citations: Raw | UnsetType = UNSET
    response_inclusion: Raw | UnsetType = UNSET
    url_sources: Raw | UnsetType = UNSET
    use_cache: Raw | UnsetType = UNSET
    max_content_tokens: Raw | UnsetType = UNSET
    display_width_px: Raw | UnsetType = UNSET
    display_height_px: Raw | UnsetType = UNSET
    display_number: Raw | UnsetType = UNSET
    enable_zoom: Raw | UnsetType = UNSET
    configs: Raw | UnsetType = UNSET
    default_config: Raw | UnsetType = UNSET
    mcp_server_name: Raw | UnsetType = UNSET
    model: Raw | UnsetType = UNSET
    caching: Raw | UnsetType = UNSET
    max_tokens: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET


class ToolChoiceBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether a tool has to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers. The budget is checked, and is otherwise the model's own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class FormatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text of the answer must look like."""

    type: Literal["json_schema"]
    schema: Raw


class OutputBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What is asked of the answer as a whole."""

    format: FormatBody | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both bodies have in common: all that becomes the prompt."""

    model: ModelName
    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    chat_template_kwargs: OwnVariables = None


class MessagesBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The body of a message to create."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)]
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    output_config: OutputBody | None = None
    output_format: FormatBody | None = None


class CountTokensBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The body of a prompt to count."""
