"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, as clients write them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.api.schemas.checks import ModelName
from gateway.api.schemas.names import described
from gateway.api.schemas.shared_fields import AgentHints, CacheControlBody, StopText
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

CacheControl = Annotated[
    CacheControlBody | None,
    described(
        "Evict the cached prompt last: for five minutes, or an hour with `ttl: 1h`, as far as the tenant's share of "
        "the cache goes. The longest of a body holds for all of it.",
        {"type": "ephemeral", "ttl": "1h"},
    ),
]
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+\Z")]


_TOOL = {"name": "f", "input_schema": {"type": "object"}}
_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


class SourceBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the content of a document or an image stands; a document's is text in the body itself."""

    type: Annotated[
        Annotated[str, Meta(max_length=64)],
        described("Of a document `text` or `content`; of an image `base64`, `url` or `file`."),
    ]
    data: Annotated[str | None, described("The text, or the bytes of an image in base64.")] = None
    media_type: Annotated[
        Annotated[str, Meta(max_length=256)] | None,
        described("Of a text: `text/plain`. Of an image its bytes say it."),
    ] = None

    content: Annotated[str | Blocks | None, described("A text, or a list of blocks of text.")] = None

    url: Annotated[str | None, described("Of an image: an https URL of a host that the operator allows.")] = None
    file_id: Annotated[
        Annotated[str, Meta(max_length=256)] | None, described("Of an image: a file that was uploaded to /v1/files.")
    ] = None


class BlockBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One block of a message: text, an image, thinking, a tool's use or result, a document, a result of a search."""

    type: Annotated[
        Annotated[str, Meta(max_length=64)],
        described(
            "text, image, document, search_result, thinking, redacted_thinking, tool_use or tool_result; in a turn "
            "of the assistant also what Anthropic's server ran: server_tool_use, mcp_tool_use, and their results."
        ),
    ]
    text: Annotated[str | None, described("The text of a text block.")] = None
    thinking: Annotated[str | None, described("What the assistant thought.")] = None
    id: Annotated[Annotated[str, Meta(max_length=256)] | None, described("The id of a tool's use.")] = None
    name: Annotated[Annotated[str, Meta(max_length=256)] | None, described("The name of the tool that is used.")] = None
    input: Annotated[Raw | UnsetType, described("The arguments of the tool's use.")] = UNSET
    tool_use_id: Annotated[
        Annotated[str, Meta(max_length=256)] | None, described("The use of a tool whose result this is.")
    ] = None
    content: Annotated[
        str | Blocks | None, described("The result of a tool or a search: a text, or a list of blocks.")
    ] = None
    is_error: Annotated[bool | None, described("The tool failed: `Error: ` is put before its result.")] = None
    # Of a document, where it stands; of a result of a search, what it is a result from.
    source: Annotated[
        SourceBody | Annotated[str, Meta(max_length=8192)] | None,
        described(
            "Where a document stands: `{type: text, media_type: text/plain, data: ...}` or `{type: content, "
            "content: ...}`. Where an image is: `{type: base64, data: ...}`, `{type: url, url: ...}` or `{type: file, "
            "file_id: ...}`. Of a result of a search: where that was found, a text."
        ),
    ] = None
    title: Annotated[
        Annotated[str, Meta(max_length=1024)] | None,
        described("The title of a document or of a result of a search, put before its text."),
    ] = None
    context: Annotated[str | None, described("What a document is about, put before its text.")] = None
    cache_control: CacheControl = None


Blocks = Annotated[list[BlockBody], Meta(max_length=MAX_MESSAGES)]


class MessageBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: Annotated[
        Literal["user", "assistant", "system"],
        described("user or assistant, or system for instructions amid the conversation."),
    ]
    content: Annotated[str | Blocks, described("A text, or a list of blocks.")]


class ToolBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may use. Types other than `custom` name tools that Anthropic has defined."""

    name: ToolName | None = None
    type: Annotated[str, Meta(max_length=64)] | None = None
    description: str | None = None
    input_schema: Parameters | None = None
    strict: bool | None = None

    cache_control: CacheControl = None

    # Read by Anthropic's servers, and without meaning here: tools run at the client.
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

    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"],
        described("`enabled`, `disabled`, or `adaptive` and `between_tools`, which leave it to the template."),
    ]
    budget_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None,
        described("Checked, and otherwise the model's own affair."),
    ] = None
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        described("`omitted` leaves the thinking out of the answer.", "omitted"),
    ] = None


class FormatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text of the answer must look like."""

    type: Literal["json_schema"]
    schema: Raw


class OutputBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Format and effort of the whole answer."""

    format: Annotated[FormatBody | None, described("A JSON schema of the text.", _FORMAT)] = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        described("How much the model thinks, where its template can say so.", "low"),
    ] = None


class MessageStreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is sent. Anthropic's own API has no such options."""

    resumable: Annotated[
        bool | None,
        described("Give events ids, and keep the stream: `GET /v1/streams/{id}` goes on after any event.", True),
    ] = None


class PromptBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both bodies have in common: all that becomes the prompt."""

    model: Annotated[ModelName, described("The model to use.")]
    messages: Annotated[
        Annotated[list[MessageBody], Meta(min_length=1, max_length=MAX_MESSAGES)],
        described("The conversation. A last turn of the assistant is the beginning of the answer."),
    ]
    system: Annotated[
        str | Blocks | None, described("What goes before the conversation: a text, or a list of blocks.", "Be brief.")
    ] = None
    tools: Annotated[
        Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None,
        described("Tools that the model may use.", [_TOOL]),
    ] = None
    tool_choice: Annotated[ToolChoiceBody | None, described("Whether a tool has to be used; only with `tools`.")] = None
    thinking: Annotated[
        ThinkingBody | None,
        described("Whether the model thinks first, where its template can say so.", {"type": "disabled"}),
    ] = None
    chat_template_kwargs: OwnVariables = None


class MessagesBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The body of a message to create."""

    max_tokens: Annotated[Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)], described("Tokens to generate at most.")]
    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None, described("0 takes the most likely token each time.", 0.5)
    ] = None
    top_p: Annotated[
        Probability | None, described("Draw from the most likely tokens that have this probability together.", 0.9)
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] | None, described("Sample from this many most likely tokens.", 40)
    ] = None
    stop_sequences: Annotated[
        Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None,
        described("Texts before which the answer ends.", ["END"]),
    ] = None
    stream: Annotated[bool | None, described("Send the answer as server-sent events.", True)] = None
    stream_options: Annotated[MessageStreamOptions | None, described("How a stream is sent; only with `stream`.")] = (
        None
    )
    output_config: Annotated[
        OutputBody | None, described("Format and effort of the whole answer.", {"format": _FORMAT})
    ] = None
    cache_control: CacheControl = None
    agent_hints: AgentHints = None
    output_format: Annotated[FormatBody | None, described("The same as `format` in `output_config`.", _FORMAT)] = None


class CountTokensBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The body of a prompt to count."""
