"""The bodies of chat completions, text completions, and the tokenizer's endpoints. None always means: left out."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.api.schemas.checks import ModelName
from gateway.api.schemas.conversation import (
    CalledCustomBody,
    CalledFunctionBody,
    Content,
    ContentPart,
    MessageBodies,
    MessageBody,
    ToolCallBody,
)
from gateway.api.schemas.images import ImageUrlBody
from gateway.api.schemas.names import Kind, ParameterTable, described
from gateway.api.schemas.parameters import AskedLogprobs, CommonBody, StreamOptions
from gateway.api.schemas.shared_fields import AgentHintsBody
from gateway.api.schemas.structured_output import JsonSchemaBody, ResponseFormatBody, StructuredOutputsBody
from gateway.api.schemas.template_options import (
    Continuation,
    Documents,
    GenerationPrompt,
    OwnTemplate,
    OwnVariables,
    Verbosity,
)
from gateway.api.schemas.thinking import ReasoningBody, ThinkingBody, ThinkingFields
from gateway.api.schemas.tools import (
    Choice,
    FunctionBodies,
    FunctionBody,
    NamedFunction,
    ToolBodies,
    ToolBody,
    ToolChoiceBody,
)
from gateway.api.schemas.unserved_names import UNSERVED, OpenAi
from shared.bounds import MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS, TokenId

TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]


class PredictionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A text that the answer probably resembles: a file before an edit, for instance."""

    type: Annotated[Literal["content"], described("Always `content`.")]
    content: Annotated[Content, described("A text, or a list of parts.")]


class ChatBody(ThinkingFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    echo: Annotated[
        bool | None, described("Begin the answer with the last message, where it is the assistant's.", True)
    ] = None
    messages: Annotated[MessageBodies, described("The conversation.")]
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None,
        described("The newer name of `max_tokens`, and stronger.", 3),
    ] = None
    logprobs: Annotated[bool | None, described("Report the log probability of each token.", True)] = None
    top_logprobs: Annotated[
        AskedLogprobs | None, described("Report this many likely alternatives too, -1 for 20; only with `logprobs`.")
    ] = None
    prediction: Annotated[
        PredictionBody | None,
        described(
            "What the answer is expected to resemble; makes it faster, never different.",
            {"type": "content", "content": "abc"},
        ),
    ] = None
    tools: ToolBodies = None
    tool_choice: Annotated[
        Choice | ToolChoiceBody | None,
        described("`none`, `auto`, `required`, one function, or the allowed ones: what may be called."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("False: at most one call an answer.")] = None
    functions: Annotated[FunctionBodies | None, described("The older form of `tools`.", [{"name": "f"}])] = None
    function_call: Annotated[
        Choice | NamedFunction | None, described("The older form of `tool_choice`: `none`, `auto`, or one function.")
    ] = None
    verbosity: Annotated[
        Verbosity | None,
        described("How long answers are: `low`, `medium` or `high`, where the template knows it.", "low"),
    ] = None
    chat_template: OwnTemplate = None
    chat_template_kwargs: OwnVariables = None
    documents: Annotated[Documents | None, described("Documents for templates that know them.", [{"text": "a"}])] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continuation = None


class CompletionBody(CommonBody, kw_only=True):
    """The body of `POST /v1/completions`."""

    echo: Annotated[bool | None, described("Begin the answer with the prompt.", True)] = None
    prompt: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)],
        described("A text, a list of texts, a list of token ids, or a list of such lists."),
    ]
    logprobs: Annotated[
        AskedLogprobs | None, described("Report log probabilities with this many alternatives; -1 for 20.", 2)
    ] = None
    suffix: Annotated[
        str | None, described("What follows the answer; for models with tokens that mark prefix and suffix.", "x")
    ] = None
    add_special_tokens: Annotated[bool | None, described("False: the prompt gets no tokens but its own.", False)] = None


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation, to turn into token ids."""

    model: Annotated[ModelName | None, described("The model to use.")] = None
    prompt: Annotated[str | None, described("The text to turn into tokens; `messages` is the other choice.")] = None
    messages: Annotated[MessageBodies | None, described("The conversation.")] = None
    add_special_tokens: Annotated[
        bool | None, described("Add the tokens that begin every prompt, as for completions.", True)
    ] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continuation = None
    chat_template: OwnTemplate = None
    chat_template_kwargs: OwnVariables = None
    tools: ToolBodies = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to turn into text."""

    tokens: Annotated[TokenIds, described("The token ids to turn into text.")]
    model: Annotated[ModelName | None, described("The model to use.")] = None


# The struct that reads each object.
_READERS: MappingProxyType[Kind, type[Struct]] = MappingProxyType(
    {
        OpenAi.CHAT: ChatBody,
        OpenAi.COMPLETION: CompletionBody,
        OpenAi.TOKENIZE: TokenizeBody,
        OpenAi.DETOKENIZE: DetokenizeBody,
        OpenAi.STREAM_OPTIONS: StreamOptions,
        OpenAi.AGENT_HINTS: AgentHintsBody,
        OpenAi.MESSAGE: MessageBody,
        OpenAi.CONTENT_PART: ContentPart,
        OpenAi.IMAGE_URL: ImageUrlBody,
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
OPENAI_NAMES = ParameterTable(_READERS, UNSERVED)
