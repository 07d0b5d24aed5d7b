"""What OpenAI's chat and completions answer: written by `whole`, and by `chunks`, which encode most bytes once."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api.operation import Operation
from gateway.api.schemas.bodies import ChatBody, CompletionBody


class TopLogprob(Struct, forbid_unknown_fields=True):
    """A token that could have stood here."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobAnswer(TopLogprob, forbid_unknown_fields=True):
    """A token with its log probability and the likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of a choice."""

    content: list[TokenLogprobAnswer]
    refusal: None


class PromptDetails(Struct, forbid_unknown_fields=True):
    """`cached_tokens` needed no computation."""

    cached_tokens: int


class CompletionDetails(Struct, forbid_unknown_fields=True):
    """Tokens by what became of them. Draft tokens are counted where drafts were verified."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageAnswer(Struct, forbid_unknown_fields=True):
    """Token counts of an answer; in the middle of a stream, without the details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class PromptLogprob(Struct, forbid_unknown_fields=True):
    """A token of the prompt, or one that could have stood there; `rank` is null where it is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id; null for the first token, which has no condition.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Struct, forbid_unknown_fields=True):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCallAnswer(Struct, forbid_unknown_fields=True):
    """A call that the model makes. Its id goes with the tool's result."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct, forbid_unknown_fields=True):
    """The message of a choice. `content` is null where there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
# Beside `length`, where the context ended the answer and not the client's limit.
StopReason = Literal["model_context_window_exceeded"]


class ChatChoice(Struct):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CallFunctionDelta(Struct, forbid_unknown_fields=True):
    """A piece of a call: its name first, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, forbid_unknown_fields=True):
    """A piece of the call `index`."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CallFunctionDelta | UnsetType = UNSET


class MessageDelta(Struct, forbid_unknown_fields=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: CallFunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What a chunk adds to a choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """An event of a streamed chat answer. The one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of a text: one entry a token; null for a prompt's first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """One text, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """A whole text answer, or an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageAnswer | UnsetType | None = UNSET


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation.", ChatCompletion, ChatBody, ChatCompletionChunk),
    Operation("post", "/v1/completions", "Continue a text.", Completion, CompletionBody, Completion),
)
