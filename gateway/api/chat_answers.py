"""The answers of OpenAI's chat and completions: the structs that describe each of them also hold and encode it.

The format has one reason, `length`, for a text that reached its client's limit and for one that ended before it because
the model's context was full. A choice whose context was full says so in `stop_reason`, a field that vLLM's choices have
too; Anthropic's format has the same word as a reason of its own. Log probabilities are nested for chat, and parallel
lists for completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, cast

from msgspec import UNSET, Struct, UnsetType

from gateway.api.answer import AnswerStamp
from gateway.api.operation import Operation
from gateway.api.schemas.bodies import ChatBody, CompletionBody
from gateway.api.usage import UsageTotals
from gateway.generation import Generation, Kind
from shared.messages import Delta, Finish, TokenLogprob


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

    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class UsageAnswer(Struct, forbid_unknown_fields=True):
    """Token counts of an answer; in the middle of a stream, without the details.

    `evicted_tokens` is how many tokens a `kv_budget` made the model forget, at the end of each choice, if it made any.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    evicted_tokens: int | UnsetType = UNSET
    evicted_by: str | UnsetType = UNSET


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
    refusal: None = None
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
    """A chunk's part of the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: CallFunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A chunk's part of a choice."""

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
    """One text, or a chunk's part of it."""

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


def usage_answer(totals: UsageTotals) -> UsageAnswer:
    """Return the `usage` object. It counts draft tokens and reasoning only where there were any."""
    prompt_tokens, completion_tokens = totals.prompt_tokens, totals.completion_tokens
    details = CompletionDetails(reasoning_tokens=totals.reasoning_tokens or UNSET)
    accepted, rejected = totals.accepted_prediction_tokens, totals.rejected_prediction_tokens
    if accepted or rejected:
        details.accepted_prediction_tokens, details.rejected_prediction_tokens = accepted, rejected
    return UsageAnswer(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptDetails(totals.cached_tokens),
        UNSET if details == CompletionDetails() else details,
        totals.evicted_tokens or UNSET,
        # Workers of earlier versions know one policy, and do not name it.
        (totals.evicted_by or "sinks") if totals.evicted_tokens else UNSET,
    )


class AnswerIdentity(Struct, frozen=True):
    """Id, format, model and time of an answer; `created` is in Unix seconds, `fingerprint` names the model's files."""

    id: str
    kind: Kind
    model: str
    created: int
    fingerprint: str | None = None
    stamp: AnswerStamp = AnswerStamp("", 0)

    @classmethod
    def new(
        cls, generation: Generation, fingerprint: str | None = None, stamp: AnswerStamp | None = None
    ) -> AnswerIdentity:
        """Identify an answer, a new one without a stamp; its id has the prefix that its endpoint's clients know.

        A fingerprint promises equal answers to equal requests: one that may get another is answered without.
        """
        if generation.kv_budget is not None and not generation.kv_budget.is_repeatable:
            fingerprint = None
        prefix = "chatcmpl-" if generation.kind == "chat" else "cmpl-"
        stamp = stamp or AnswerStamp.new()
        return cls(prefix + stamp.token, generation.kind, generation.name, stamp.created, fingerprint, stamp)

    def call_id(self, choice: int, call: int) -> str:
        """Return the id of a call of a choice, which the client names when it gives the call's result."""
        return "call_" + self.stamp.derived(choice, call)

    def whole(self, choices: list[Any], usage: UsageAnswer) -> ChatCompletion | Completion:
        """Return the whole answer of choices of its kind."""
        stamp = (self.created, self.model, self.fingerprint)
        if self.kind == "chat":
            return ChatCompletion(self.id, "chat.completion", *stamp, choices, usage)
        return Completion(self.id, "text_completion", *stamp, choices, usage)

    def chunk(
        self, choices: list[Any], usage: UsageAnswer | UnsetType | None = UNSET
    ) -> ChatCompletionChunk | Completion:
        """Return an event of the streamed answer, with choices of its kind."""
        stamp = (self.created, self.model, self.fingerprint)
        if self.kind == "chat":
            return ChatCompletionChunk(self.id, "chat.completion.chunk", *stamp, choices, usage)
        return Completion(self.id, "text_completion", *stamp, choices, usage)


CONTEXT_FULL: StopReason = "model_context_window_exceeded"


def finish_reason(reason: str, num_calls: int, is_function_call: bool) -> FinishReason:
    """Return why a choice ended: a text that ended by itself and has calls ended for them."""
    if reason != "stop" or not num_calls:
        return cast("FinishReason", reason)
    return "function_call" if is_function_call else "tool_calls"


def is_context_full(finish: Finish, max_tokens: int | None) -> bool:
    """Whether a text is shorter than its client allowed, None for any length, because the context holds no more."""
    if finish.reason != "length" or finish.usage is None:
        return False
    return max_tokens is None or finish.usage.completion_tokens < max_tokens


# JSON has no infinity; OpenAI's API uses this number for "never".
_LEAST = -9999.0


def chat_logprobs(entries: Iterable[TokenLogprob | None]) -> ChatLogprobs:
    """Return the `logprobs` object of a chat choice."""
    content = []
    for entry in filter(None, entries):
        top = [TopLogprob(each.token, _finite(each.logprob), list(each.bytes)) for each in entry.top]
        content.append(TokenLogprobAnswer(entry.token, _finite(entry.logprob), list(entry.bytes), top))
    return ChatLogprobs(content, None)


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], offset: int, first_token: str = ""
) -> CompletionLogprobs:
    """Return the `logprobs` object of a completion choice.

    An entry is None for the prompt's first token, named `first_token`, whose probability has no condition. `offset`
    counts the characters of the choice's text before these tokens.
    """
    tokens = [first_token if entry is None else entry.token for entry in entries]
    offsets = list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else []
    return CompletionLogprobs(
        tokens,
        [None if entry is None else _finite(entry.logprob) for entry in entries],
        [None if entry is None else _alternatives(entry) for entry in entries],
        offsets,
    )


def prompt_logprobs(entries: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Return a prompt's log probabilities as vLLM reports them: for each token, its own and the likeliest, by id.

    The rank of a token that is not among the likeliest is not known.
    """
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprob) -> dict[str, PromptLogprob]:
    ranked = ((None, entry), *enumerate(entry.top, 1))
    return {str(each.token_id): PromptLogprob(_finite(each.logprob), rank, each.token) for rank, each in ranked}


def first_token_name(delta: Delta) -> str:
    """Return the name of a prompt's first token, which has no entry: the text before all other tokens.

    A delta that still has the prompt's token ids here belongs to an answer that names its tokens by their ids.
    """
    if delta.prompt_token_ids:
        return token_id_name(delta.prompt_token_ids[0])
    entries = (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))
    num_rest = sum(len(entry.bytes) for entry in entries if entry is not None)
    raw = delta.text.encode()
    return raw[: max(0, len(raw) - num_rest)].decode(errors="replace")


def token_id_name(token_id: int) -> str:
    """Return the name of a token that is named by its id."""
    return f"token_id:{token_id}"


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    alternatives = {top.token: _finite(top.logprob) for top in entry.top}
    alternatives.setdefault(entry.token, _finite(entry.logprob))
    return alternatives


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation.", ChatCompletion, ChatBody, ChatCompletionChunk),
    Operation("post", "/v1/completions", "Continue a text.", Completion, CompletionBody, Completion),
)
