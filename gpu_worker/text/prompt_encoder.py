"""Encodes texts without stalling the event loop, and without one client's texts delaying another's prompt.

A text that cannot fit into the model's context is refused by its length, before it is encoded. Short prompts are
encoded at once. Long ones wait in a lane of their own, in turns by tenant. Calls of `/tokenize` have another lane, with
one thread that yields to everything else: no prompt ever waits for them.

From a query and a text to the prompt by which a model scores the text.

A chat template with the roles `query` and `document` makes it, the instruction as a system message. Otherwise a
cross-encoder gets its tokenizer's pair of texts, and a model that generates is asked for the text's relevance in the
words of Qwen3-Reranker, in its own chat template.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct

from gpu_worker.text.fair_lane import FairLane
from gpu_worker.text.model_tasks import ScoreForm
from gpu_worker.text.tokenizer import EncodedPrompt, InfillPrompt, ModelTokenizer
from shared.conversation import ChatMessage, ChatOptions, Conversation
from shared.errors import BadRequestError, PromptTooLongError, prompt_too_long

# About 0.7 ms of encoding, several times the price of a trip through the pool.
INLINE_CHARACTERS = 2048
INLINE_PIECES = 64
INLINE_TOKENS = 2048
# What lanes charge beside characters: for each message, part, call and image that a template goes through, and for each
# token that becomes text.
PIECE_CHARACTERS = INLINE_CHARACTERS // INLINE_PIECES
TOKEN_CHARACTERS = 4
NUM_PROMPT_THREADS = 2
# A text may be tokenized to be cut up afterwards, so this much is allowed whatever the model's context holds.
MIN_CALL_CHARACTERS = 256 << 10
MAX_WAITING_CALL_BYTES = 8 << 20
MAX_CALL_WAIT_S = 4.0


class ScoredText(Struct, frozen=True):
    """A text to score for a query, by an `instruction`; a prompt longer than `max_tokens` is cut at its end."""

    query: str
    document: str
    instruction: str | None = None
    max_tokens: int | None = None

    @property
    def num_characters(self) -> int:
        """Length of all its texts."""
        return len(self.query) + len(self.document) + len(self.instruction or "")


PromptText = str | InfillPrompt | ScoredText | Conversation


class PromptEncoder:
    """Owns the lanes: `prompts` for long prompts, `calls` for `/tokenize`. Used from the event loop only.

    Attributes:
        max_characters, max_call_characters: More cannot fit, even if each token were the longest there is.
        max_call_tokens: The answer to a call has no more.
    """

    def __init__(self, tokenizer: ModelTokenizer, max_model_len: int, score: ScoreForm | None = None) -> None:
        self._score = score
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.max_characters = max_model_len * tokenizer.max_token_bytes
        self.max_call_characters = max(MIN_CALL_CHARACTERS, self.max_characters)
        self.max_call_tokens = max(MIN_CALL_CHARACTERS, max_model_len)
        self.prompts = FairLane("prompts", NUM_PROMPT_THREADS)
        self.calls = FairLane("tokenize", 1, MAX_WAITING_CALL_BYTES, MAX_CALL_WAIT_S, yields=True)

    def is_short(self, prompt: PromptText) -> bool:
        """Return True if `encode_now` will not stall the loop."""
        if isinstance(prompt, Conversation):
            has_own_template = prompt.options.template is not None
            if has_own_template or prompt.num_pieces > INLINE_PIECES:
                return False
        return num_characters(prompt) <= INLINE_CHARACTERS

    def check_length(self, prompt: PromptText, max_characters: int | None = None) -> None:
        """Refuse with `BadRequestError` a text that cannot fit, by its length alone."""
        limit = self.max_characters if max_characters is None else max_characters
        length = num_characters(prompt)
        if length > limit:
            param = "messages" if isinstance(prompt, Conversation) else "prompt"
            message = prompt_too_long(length, limit, "characters", self._max_model_len)
            raise BadRequestError(message, param, "context_length_exceeded")

    def encode_now(
        self, prompt: PromptText, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> EncodedPrompt:
        """Return the tokens of a prompt; `BadRequestError` if it cannot be encoded, or has more than `max_tokens`."""
        if isinstance(prompt, ScoredText):
            assert self._score is not None, "the request was not checked"
            return EncodedPrompt(score_prompt(self._tokenizer, self._score, prompt))
        if isinstance(prompt, str):
            encode = self._tokenizer.encode_text
            return EncodedPrompt(encode(prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens))
        if isinstance(prompt, InfillPrompt):
            return EncodedPrompt(self._tokenizer.encode_infill(prompt, add_special_tokens=add_special_tokens))
        if not prompt.messages:
            raise BadRequestError("messages must not be empty.", "messages")
        try:
            return self._tokenizer.encode_chat(prompt.messages, prompt.options, max_tokens)
        except PromptTooLongError as error:
            raise error.naming("messages") from None

    async def encode(
        self,
        prompt: PromptText,
        *,
        tenant: str = "",
        is_wanted: Callable[[], bool] = lambda: True,
        add_special_tokens: bool = True,
        is_truncated: bool = False,
    ) -> EncodedPrompt:
        """Return the tokens of a request's prompt, of any length; tenants take turns.

        Args:
            prompt: A text, or what else a request has.
            tenant: Whose turn it takes.
            is_wanted: Asked when it is its turn.
            add_special_tokens: For a text, those that the tokenizer itself adds.
            is_truncated: Only its end will be used: it may be longer than what fits.

        Raises:
            BadRequestError: The prompt cannot be encoded, or cannot fit.
            asyncio.CancelledError: It was not wanted any more.
        """
        if self.is_short(prompt):
            return self.encode_now(prompt, add_special_tokens=add_special_tokens)
        self.check_length(prompt, self.max_call_characters if is_truncated else None)
        max_tokens = None if is_truncated else self._max_model_len
        encode = partial(self.encode_now, prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        return await self.prompts.run(tenant, cost(prompt), encode, is_wanted)

    def decode_now(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of token ids, special tokens left out."""
        return self._tokenizer.decode(token_ids)

    def close(self) -> None:
        """End the threads; encodings that have not started are dropped."""
        self.prompts.close()
        self.calls.close()


def cost(prompt: PromptText) -> int:
    """Return how much work it is to encode a prompt, in characters."""
    num_pieces = prompt.num_pieces if isinstance(prompt, Conversation) else 1
    return num_characters(prompt) + PIECE_CHARACTERS * num_pieces


def num_characters(prompt: PromptText) -> int:
    """Return the length of all texts in a prompt."""
    if isinstance(prompt, InfillPrompt):
        return len(prompt.prefix) + len(prompt.suffix)
    return len(prompt) if isinstance(prompt, str) else prompt.num_characters


_DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
# A model that could think before it answers is to answer at once.
_AT_ONCE = ChatOptions(variables='{"enable_thinking":false}')
_ROLES = ("query", "document")

Turns = Callable[[str], list[ChatMessage]]


def score_prompt(tokenizer: ModelTokenizer, form: ScoreForm, scored: ScoredText) -> list[int]:
    """Return the prompt's tokens; `BadRequestError` if the model takes no instruction, or it cannot be encoded."""
    query = scored.query
    instruction = form.instruction if scored.instruction is None else scored.instruction
    if tokenizer.has_chat_roles(*_ROLES):
        asked = [] if instruction is None else [_turn("system", instruction)]
        asked.append(_turn("query", query))
        return _conversation(tokenizer, scored, lambda text: [*asked, _turn("document", text)])
    if form.plan.readout == "classes":
        if scored.instruction is not None:
            raise BadRequestError("This model takes no 'instruction': it scores query and text alone.", "instruction")
        # A prompt of the model's own stands directly before the query, as in sentence-transformers.
        return tokenizer.encode_pair((instruction or "") + query, scored.document, scored.max_tokens)
    question = f"<Instruct>: {instruction or _DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: "
    return _conversation(tokenizer, scored, lambda text: [_turn("system", _JUDGE), _turn("user", question + text)])


def _conversation(
    tokenizer: ModelTokenizer, scored: ScoredText, turns: Callable[[str], list[ChatMessage]]
) -> list[int]:
    """Return the prompt of the turns that are made of a document, which is cut to fit."""
    document = scored.document
    while True:
        token_ids = tokenizer.encode_chat(turns(document), _AT_ONCE).token_ids
        excess = 0 if scored.max_tokens is None else len(token_ids) - scored.max_tokens
        if excess <= 0:
            return token_ids
        if not document:
            message = f"The prompt has {excess} tokens too many without a text. Shorten 'query' or 'instruction'."
            raise BadRequestError(message, "query", "context_length_exceeded")
        document = tokenizer.without_last_tokens(document, excess)


def _turn(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)
