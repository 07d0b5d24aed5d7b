"""A client's request, validated and not yet dispatched: the value that passes from schemas to the data path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from shared.bounds import MAX_SEQUENCES
from shared.cache_hints import CacheHints
from shared.conversation import ChatMessage, ChatOptions, Conversation
from shared.formats import OutputReader, PlainReader, Tool, ToolChoice
from shared.grammar import Grammar
from shared.kv_budget import KvBudget
from shared.media import Detail, MediaRef
from shared.messages import Lane
from shared.pooling import Pooling, Task
from shared.sampling import Sampling

Kind = Literal["chat", "completion", "embedding", "score"]

MAX_BYTES_AT_ONCE = 8 << 20
"""Of the prompts of one request in the queue: a prompt of 1 MB with 128 choices would fill it."""
_BYTES_PER_TOKEN_ID = 4


class ImageSource(Struct):
    """An image that a conversation shows, as its client sent it. One of `data`, `url` and `file_id` is set.

    Attributes:
        where: Its place in the body, such as `messages.[0].content.[1]`.
        data: Its bytes, whose header was read; let go of once they are stored, since an answer may take minutes.
        url: Where to fetch it from.
        file_id: Which of the tenant's files it is.
        num_pixels: Of the decoded image, once that is known.
        ref: Its reference, once it was fetched, read from a file or measured, so that this happens once.
    """

    where: str
    detail: Detail = "auto"
    data: bytes | None = None
    url: str | None = None
    file_id: str | None = None
    num_pixels: int = 0
    ref: MediaRef | None = None


class Prompt(Struct, frozen=True):
    """One prompt: a conversation, a text, or token ids. Exactly one of these fields is set.

    `chat` goes with a conversation: what the template gets besides the messages. `query` goes with a text that is to be
    scored: what it is scored against. `suffix` goes with a text: what follows the answer.

    `images` goes with a conversation: what its messages show, by index. `media` is the same once it is stored, and
    `image_places` says where each stands in the body.

    `estimated_tokens` is computed from lengths alone, before admission; the worker reports the true count.
    """

    estimated_tokens: int
    messages: tuple[ChatMessage, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: ChatOptions | None = None
    query: str | None = None
    suffix: str | None = None
    images: tuple[ImageSource, ...] = ()
    media: tuple[MediaRef, ...] = ()
    image_places: tuple[str, ...] = ()

    @property
    def num_characters(self) -> int:
        """Length of all its texts."""
        if self.messages is not None:
            return Conversation(self.messages, self.chat or ChatOptions()).num_characters
        return len(self.text or "") + len(self.query or "") + len(self.suffix or "")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a conversation offers.

    Attributes:
        tools: Those that may be called; none where `choice` forbids it.
        choice: Whether the answer has to call one.
        is_parallel: The answer may have more than one call.
        is_function_call: Asked for with `functions`, the form before tools, and answered so.
        is_exclusive: What looks like a call of another tool is none: the client has forbidden others, or a grammar
            keeps the model from them. Otherwise such a call is handed on, and the client says that there is no such
            tool.
        schema_places: Where in the client's body the schema of each tool stands, for messages.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    is_parallel: bool = True
    is_function_call: bool = False
    is_exclusive: bool = False
    schema_places: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class OutputReading:
    """How the text of an answer is parsed into content, reasoning and tool calls.

    Attributes:
        new_reader: Makes the reader of one choice; its argument is true if the prompt has opened the reasoning.
        format_name: Of the chat format that it reads.
        max_calls: Calls that the client can take; further ones are left out. None for any number.
        includes_reasoning: The client gets the reasoning; without, it is read and left out.
        is_function_call: The one call is sent as `function_call`, the format before tools.
    """

    new_reader: Callable[[bool], OutputReader]
    format_name: str = ""
    max_calls: int | None = None
    includes_reasoning: bool = True
    is_function_call: bool = False

    def includes_call(self, index: int) -> bool:
        """Whether the client gets the call with this number, counted from 0."""
        return self.max_calls is None or index < self.max_calls


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that the client wants the answer to have, and the field that asks for it."""

    field: str
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Details:
    """The details that an answer shows besides its text and its log probabilities.

    Attributes:
        token_ids: Report the token ids of prompt and answer.
        prompt_logprobs: Report the log probabilities of the prompt, apart from those of the answer.
        echoes_logprobs: The log probabilities of an echoed prompt stand before those of the answer.
        tokens_as_ids: Call the tokens of log probabilities by their ids.
        usage_so_far: Every chunk of a stream counts tokens.
        opening: Text before that of each choice.
    """

    token_ids: bool = False
    prompt_logprobs: bool = False
    echoes_logprobs: bool = False
    tokens_as_ids: bool = False
    usage_so_far: bool = False
    opening: str = ""

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the answer shows the prompt's token ids, or the first one, which has no log probability."""
        return self.token_ids or (self.tokens_as_ids and self.echoes_logprobs)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of the sequences of each prompt only the likeliest are returned, by the mean log probability of their tokens."""

    num_returned: int
    shows_logprobs: bool


PLAIN_READING = OutputReading(lambda starts_in_reasoning: PlainReader())


class Generation(Struct, frozen=True):
    """A validated completion request: `len(prompts) * n` sequences.

    A struct of msgspec, although it stays in this process: each request makes one, and a frozen dataclass of as many
    fields takes longer to make than its body takes to parse.

    Attributes:
        kind: Which endpoint's wire format answers.
        n: Sequences of each prompt.
        deterministic: Temperature 0 or an explicit seed: its answer may be cached.
        sampling: Shared by all choices; choice `i` of a prompt adds `i` to the seed.
        timeout_s: Client's own deadline for the whole answer, or None for the lane's default.
        prediction: A text that the answer probably resembles; without influence on it.
        looser_grammar: Takes the place of the grammar where this cannot be compiled: tools that are not strict may have
            schemas that are not supported.
        structured_output: The form of the content. `sampling.grammar` is the same, or made of it and the tools.
        tools: Those of the conversation; None without tools.
        may_reason: The client has not turned the model's reasoning off.
        includes_reasoning: The client gets the reasoning.
        pooling: The answer is numbers made of each prompt, and nothing is generated.
        left_out: Sampling parameters that the client did not name and the model may have defaults for.
        ranking: Which of the sequences are returned; None for all.
        is_resumable: Its stream is logged: a client that has lost it goes on with any gateway.
        details: Further output; None if only the text is wanted.
        add_special_tokens, truncate_prompt_tokens, cache_hints, kv_budget: As in `Request`.
        cache_salt: As in `Request`; answers are repeated only to those who give the same.
        base: The model that answers with the adapter that `model` names; None where it names a model.
        adapter: Digest of that adapter's content when the request came.
        alias: The name that the client asked for, if it is an alias of `model`.
        reading: How the text is read, once the model's chat format is known; None where all of it is content.
    """

    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: Sampling
    deterministic: bool
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    lane: Lane = "interactive"
    priority: int = 0
    timeout_s: float | None = None
    prediction: str | None = None
    structured_output: StructuredOutput | None = None
    looser_grammar: Grammar | None = None
    tools: ToolUse | None = None
    may_reason: bool = True
    includes_reasoning: bool = True
    details: Details | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    cache_hints: CacheHints | None = None
    kv_budget: KvBudget | None = None
    reading: OutputReading | None = None
    pooling: Pooling | None = None
    left_out: tuple[str, ...] = ()
    ranking: Ranking | None = None
    is_resumable: bool = False
    base: str | None = None
    adapter: str | None = None
    alias: str | None = None

    @property
    def name(self) -> str:
        """The name that the client asked for, and that its answer shows."""
        return self.model if self.alias is None else self.alias

    @property
    def served_model(self) -> str:
        """The model whose workers answer."""
        return self.model if self.base is None else self.base

    @property
    def has_images(self) -> bool:
        """Whether it shows images that are not stored yet."""
        return any(prompt.images for prompt in self.prompts)

    @property
    def conversation_field(self) -> str:
        """The field of the body that has the conversation."""
        return "messages"

    @property
    def waits_long(self) -> bool:
        """Whether it may wait for hours until it is computed, and not for minutes."""
        return self.lane == "batch"

    @property
    def task(self) -> Task:
        """The task for the prompts."""
        return "generate" if self.pooling is None else self.pooling.task

    @property
    def num_choices(self) -> int:
        """Choices of each prompt in the answer."""
        return self.n if self.ranking is None else self.ranking.num_returned

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated, and wire requests to publish."""
        return len(self.prompts) * self.n

    @property
    def num_at_once(self) -> int:
        """Sequences that are queued or computed at once, at most. Each takes its whole prompt through the queue."""
        if len(self.prompts) * self.n == 1:
            return 1
        sizes = (each.num_characters + _BYTES_PER_TOKEN_ID * len(each.token_ids or ()) for each in self.prompts)
        return min(self.num_sequences, MAX_SEQUENCES, max(1, MAX_BYTES_AT_ONCE // max(1, *sizes)))

    @property
    def estimated_prompt_tokens(self) -> int:
        """Estimated prompt tokens over all prompts, each counted once."""
        prompts = self.prompts
        return prompts[0].estimated_tokens if len(prompts) == 1 else sum(prompt.estimated_tokens for prompt in prompts)
