"""The body of `POST /v1/responses`, and the items of a conversation, as clients may write them and as they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.api.schemas.checks import ModelName, given, invalid_value, missing_parameter
from gateway.api.schemas.names import described
from gateway.api.schemas.parameters import EndUser
from gateway.api.schemas.shared_fields import CacheFields
from gateway.api.schemas.structured_output import schema_output
from gateway.api.schemas.template_options import OwnVariables, Verbosity
from gateway.api.schemas.thinking import ReasoningEffort, ThinkingBody
from gateway.api.schemas.tools import Choice
from gateway.generation import StructuredOutput
from gateway.responses.tools import ResponseToolBody, ResponseToolChoiceBody
from shared.bounds import (
    MAX_LOGPROB_TOKENS,
    MAX_MESSAGES,
    MAX_OUTPUT_TOKENS,
    MAX_TOOLS,
    NumLogprobs,
    TokenId,
)
from shared.grammar import Grammar

_FIELD = "text.format"
_TYPES = ("text", "json_object", "json_schema")


class TextFormatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A format; the name says nothing about the text."""

    type: Annotated[Annotated[str, Meta(max_length=64)], described("`text`, `json_object` or `json_schema`.")]
    name: Annotated[Annotated[str, Meta(max_length=256)] | None, described("Repeated in the response.", "answer")] = (
        None
    )
    description: Annotated[str | None, described("Repeated in the response.", "An answer.")] = None
    schema: Annotated[
        Raw | UnsetType, described("The schema, with `json_schema`.", {"type": "object", "maxProperties": 0})
    ] = UNSET
    strict: Annotated[bool | None, described("Refuse a schema that can be kept to in part only.", True)] = None


def text_output(body: TextFormatBody | None) -> StructuredOutput | None:
    """Return the required format of the text, None for any; `ApiError` 400 for an unknown or incomplete format."""
    if body is None or body.type == "text":
        return None
    if body.type == "json_object":
        return StructuredOutput(_FIELD, Grammar(kind="json_schema", source='{"type":"object"}'))
    if body.type != "json_schema":
        raise invalid_value(f"{_FIELD}.type", f"'{_FIELD}.type' must be one of {', '.join(_TYPES)}.")
    field = f"{_FIELD}.schema"
    schema = given(body.schema)
    if schema is None:
        raise missing_parameter(field)
    return schema_output(field, schema, strict=bool(body.strict))


def repeated_format(body: TextFormatBody | None) -> dict[str, Any]:
    """Return the format as the response repeats it."""
    if body is None or body.type != "json_schema":
        return {"type": "text" if body is None else body.type}
    fields: dict[str, Any] = {"type": body.type, "name": body.name or "", "strict": bool(body.strict)}
    return fields | {"description": body.description, "schema": body.schema}


Name = Annotated[str, Meta(max_length=256)]
ShortText = Annotated[str, Meta(max_length=512)]
ResponseId = Annotated[str, Meta(max_length=128)]
# However long a summary is asked for, it is the whole reasoning.
SummaryKind = Literal["auto", "concise", "detailed"]


# It holds strings alone. A body has a hundred thousand of them, which the garbage collector need not look at.
class PartBody(Struct, kw_only=True, omit_defaults=True, gc=False):
    """One part of an item: text of some kind, or something that is not served and refused by its type."""

    type: Annotated[
        Name,
        described("`input_text`, `input_image`, `output_text`, `text`, `summary_text`, `reasoning_text` or `refusal`."),
    ]
    text: Annotated[str | None, described("Its text.")] = None
    refusal: Annotated[str | None, described("Why the model has refused.")] = None
    image_url: Annotated[
        str | None, described("Of an `input_image`: a data URL, or an https URL of a host that the operator allows.")
    ] = None
    file_id: Annotated[Name | None, described("Of an `input_image`: an uploaded file, instead of `image_url`.")] = None
    detail: Annotated[
        Name | None, described("Of an `input_image`: how finely to look, `auto`, `low`, `high` or `original`.")
    ] = None


Parts = Annotated[Sequence[PartBody], Meta(max_length=MAX_MESSAGES)]


class ItemBody(Struct, kw_only=True, omit_defaults=True):
    """One item of a conversation as stored; its type determines its fields. Other fields are ignored."""

    type: Annotated[
        Name | None,
        described(
            "`message` if left out, `function_call`, `function_call_output`, `reasoning`, `item_reference`, "
            "`compaction`; `compaction_trigger` as the last one asks for a summary of the conversation. Calls of "
            "OpenAI's own tools and their results (`mcp_call`, `shell_call`, `custom_tool_call`) are read as those of "
            "functions."
        ),
    ] = None
    id: Annotated[ResponseId | None, described("Its id; of an `item_reference`, which item is meant.")] = None
    status: Annotated[Name | None, described("Repeated where the items of a response are listed.")] = None
    role: Annotated[Name | None, described("Of a message: user, assistant, system or developer.")] = None
    content: str | Parts | None = None
    call_id: Annotated[Name | None, described("Which call this is, or whose result.")] = None
    name: Annotated[Name | None, described("The function that is called, or whose result this is.")] = None
    namespace: Annotated[Name | None, described("The namespace of the function.")] = None
    arguments: Annotated[str | None, described("Of a call: JSON text.")] = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: Annotated[
        str | None, described("Of reasoning and of `compaction`: what this server has encrypted for the same tenant.")
    ] = None


class InputPartBody(PartBody, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One part of an item of a request."""


InputParts = Annotated[list[InputPartBody], Meta(max_length=MAX_MESSAGES)]


class InputItemBody(ItemBody, kw_only=True, forbid_unknown_fields=True):
    """One item of a request."""

    content: Annotated[
        str | InputParts | None, described("Of a message or of reasoning: a text, or a list of parts.")
    ] = None
    output: Annotated[str | InputParts | None, described("Of a result: a text, or a list of parts.")] = None
    summary: Annotated[InputParts | None, described("Of reasoning: its text, where `content` has none.")] = None


InputItems = Annotated[list[InputItemBody], Meta(max_length=MAX_MESSAGES)]


class ReasoningBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The reasoning effort, and the field that returns the reasoning; `generate_summary` is an older name."""

    effort: Annotated[
        ReasoningEffort | None, described("How much the model thinks, as its chat template understands it.", "low")
    ] = None
    enabled: Annotated[bool | None, described("Think, or do not.", False)] = None
    summary: Annotated[
        SummaryKind | None,
        described(
            "`auto`, `concise` or `detailed`: reasoning stands in `summary` instead of `content`, whole and "
            "not shortened.",
            "auto",
        ),
    ] = None
    generate_summary: Annotated[SummaryKind | None, described("An older name of `summary`.", "auto")] = None


class TextBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the text."""

    format: Annotated[TextFormatBody | None, described("The form of the text.", {"type": "json_object"})] = None
    verbosity: Annotated[
        Verbosity | None, described("How long answers are, where the chat template knows it.", "low")
    ] = None


Truncation = Literal["auto", "disabled"]


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is sent: always in the same way, so there is nothing to choose."""


class ResponseBody(CacheFields, kw_only=True, forbid_unknown_fields=True):
    """The whole body: what OpenAI has, and the sampling parameters of chat completions. None always means: left out."""

    model: Annotated[ModelName, described("The model to use.")]
    input: Annotated[
        str | InputItems | None,
        described("A text, or a list of items: messages, calls of functions and their results, reasoning."),
    ] = None
    instructions: Annotated[
        str | None, described("A system message before the conversation; not kept for the next response.", "Be brief.")
    ] = None
    previous_response_id: Annotated[
        ResponseId | None, described("Go on with the conversation of a stored response.")
    ] = None
    store: Annotated[
        bool | None,
        described("Keep the response for a week, so that it can be read and continued; true if left out.", False),
    ] = None
    background: Annotated[
        bool | None, described("Answer at once, and compute the response as a job of the batch lane.", True)
    ] = None
    stream: Annotated[bool | None, described("Send the response as typed server-sent events.", True)] = None
    stream_options: Annotated[ResponseStreamOptions | None, described("How the stream is sent.")] = None
    include: Annotated[
        Annotated[list[Name], Meta(max_length=32)] | None,
        described("More output: log probabilities, reasoning to give back.", ["reasoning.encrypted_content"]),
    ] = None
    metadata: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)] | None,
        described("Up to 16 texts that the response repeats.", {"task": "a"}),
    ] = None

    tools: Annotated[
        Annotated[list[ResponseToolBody], Meta(max_length=MAX_TOOLS)] | None,
        described("Functions that the model may call.", [{"type": "function", "name": "f"}]),
    ] = None
    tool_choice: Annotated[
        Choice | ResponseToolChoiceBody | None,
        described("Whether functions are called: `auto`, `none`, `required`, or which.", "none"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("Allow several calls in one response.", False)] = None
    text: Annotated[TextBody | None, described("The format of the text.", {"format": {"type": "json_object"}})] = None
    truncation: Annotated[
        Truncation | None,
        described(
            "`auto` drops the oldest turns of a conversation that is too long for the model, and then the oldest calls "
            "with their results. `max_output_tokens` are kept free, up to half of the context; without it a quarter, "
            "up to 16,384.",
            "auto",
        ),
    ] = None
    reasoning: Annotated[
        ReasoningBody | None, described("Reasoning effort, and where reasoning is returned.", {"effort": "low"})
    ] = None
    enable_thinking: Annotated[bool | None, described("Think, or do not, where the template knows it.", False)] = None
    thinking: Annotated[
        ThinkingBody | bool | None, described("Another form of `enable_thinking`.", {"type": "disabled"})
    ] = None
    chat_template_kwargs: OwnVariables = None

    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None,
        described("Tokens to generate at most, reasoning included.", 3),
    ] = None
    top_logprobs: Annotated[
        NumLogprobs | None,
        described("Report the log probability of each token, and of this many likely alternatives.", 2),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKENS)] | None,
        described("Report these tokens instead of the likeliest ones; with log probabilities."),
    ] = None

    # Without influence on the answer, and repeated in the response.
    user: Annotated[
        EndUser | None, described("The end user; a name is repeated in the response, an object is not.", "someone")
    ] = None
    safety_identifier: Annotated[ShortText | None, described("Repeated in the response.", "someone")] = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None,
        described("Repeated in the response. It limits built-in tools, of which there are none.", 3),
    ] = None
