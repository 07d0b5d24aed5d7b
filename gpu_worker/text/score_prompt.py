"""From a query and a text to the prompt by which a model scores the text.

A chat template with the roles `query` and `document` makes it, the instruction as a system message. Otherwise a
cross-encoder gets its tokenizer's pair of texts, and a model that generates is asked for the text's relevance in the
words of Qwen3-Reranker, in its own chat template.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from gpu_worker.text.model_tasks import ScoreForm
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage, ChatOptions
from shared.errors import BadRequestError

_DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
# A model that could think before it answers is to answer at once.
_AT_ONCE = ChatOptions(variables='{"enable_thinking":false}')
_ROLES = ("query", "document")

Turns = Callable[[str], list[ChatMessage]]


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
