"""The body of `POST /v1/responses`, and the items of a conversation, as clients may write them and as they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.api.schemas.model_name import ModelName
from gateway.api.schemas.parameters import EndUser
from gateway.api.schemas.sampling_fields import SamplingFields
from gateway.api.schemas.template_options import OwnVariables, Verbosity
from gateway.api.schemas.thinking import ReasoningEffort, ThinkingBody
from gateway.api.schemas.tools import Choice
from gateway.responses.text_format import TextFormatBody
from gateway.responses.tools import ResponseToolBody, ResponseToolChoiceBody
from shared.bounds import (
    MAX_LOGPROB_TOKENS,
    MAX_MESSAGES,
    MAX_OUTPUT_TOKENS,
    MAX_TOOLS,
    NumLogprobs,
    TokenId,
)

Name = Annotated[str, Meta(max_length=256)]
ShortText = Annotated[str, Meta(max_length=512)]
ResponseId = Annotated[str, Meta(max_length=128)]
# However long a summary is asked for, it is the whole reasoning.
SummaryKind = Literal["auto", "concise", "detailed"]


# It holds strings alone. A body has a hundred thousand of them, which the garbage collector need not look at.
class PartBody(Struct, kw_only=True, omit_defaults=True, gc=False):
    """One part of an item: text of some kind, or something that is not served and refused by its type."""

    type: Name
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[Sequence[PartBody], Meta(max_length=MAX_MESSAGES)]


class ItemBody(Struct, kw_only=True, omit_defaults=True):
    """One item of a conversation as it is kept; its type says which of the fields it has. Others are read over."""

    type: Name | None = None
    id: ResponseId | None = None
    status: Name | None = None
    role: Name | None = None
    content: str | Parts | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None


class InputPartBody(PartBody, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One part of an item of a request."""


InputParts = Annotated[list[InputPartBody], Meta(max_length=MAX_MESSAGES)]


class InputItemBody(ItemBody, kw_only=True, forbid_unknown_fields=True):
    """One item of a request."""

    content: str | InputParts | None = None
    output: str | InputParts | None = None
    summary: InputParts | None = None


InputItems = Annotated[list[InputItemBody], Meta(max_length=MAX_MESSAGES)]


class ReasoningBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the model is to think, and where the client wants to read it; `generate_summary` is an older name."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    summary: SummaryKind | None = None
    generate_summary: SummaryKind | None = None


class TextBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text is to look like."""

    format: TextFormatBody | None = None
    verbosity: Verbosity | None = None


class ResponseBody(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The whole body: what OpenAI has, and the sampling parameters of chat completions. None always means: left out."""

    model: ModelName
    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    include: Annotated[list[Name], Meta(max_length=32)] | None = None
    metadata: Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)] | None = None

    tools: Annotated[list[ResponseToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | ResponseToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingBody | bool | None = None
    chat_template_kwargs: OwnVariables = None

    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    top_logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKENS)] | None = None

    # Without influence on the answer, and repeated in the response.
    user: EndUser | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
