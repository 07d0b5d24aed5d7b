"""From a query and a text to the prompt by which a model scores the text.

A chat template that knows the roles `query` and `document` makes it, as in sentence-transformers; an instruction is a
system message. Without such a template, a cross-encoder gets its tokenizer's pair of texts, and a model that generates
is asked, in the words of Qwen3-Reranker, whether the text is relevant: its own chat template then makes the very prompt
that these were trained on.
"""

from __future__ import annotations

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


class ScoredText(Struct, frozen=True):
    """What is scored: a text, for a query; `instruction` says what makes it relevant."""

    query: str
    document: str
    instruction: str | None = None

    @property
    def num_characters(self) -> int:
        """Length of all its texts."""
        return len(self.query) + len(self.document) + len(self.instruction or "")


def score_prompt(tokenizer: ModelTokenizer, form: ScoreForm, scored: ScoredText) -> list[int]:
    """Return the token ids of the prompt.

    Raises:
        BadRequestError: The model takes no instruction, or the prompt cannot be encoded.
    """
    query, document = scored.query, scored.document
    instruction = form.instruction if scored.instruction is None else scored.instruction
    if tokenizer.has_chat_roles(*_ROLES):
        turns = [] if instruction is None else [("system", instruction)]
        turns += [("query", query), ("document", document)]
        return _conversation(tokenizer, turns)
    if form.plan.readout == "classes":
        if scored.instruction is not None:
            raise BadRequestError("This model takes no 'instruction': it scores query and text alone.", "instruction")
        # A prompt of the model's own stands directly before the query, as in sentence-transformers.
        return tokenizer.encode_pair((instruction or "") + query, document)
    asked = f"<Instruct>: {instruction or _DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return _conversation(tokenizer, [("system", _JUDGE), ("user", asked)])


def _conversation(tokenizer: ModelTokenizer, turns: list[tuple[str, str]]) -> list[int]:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    return tokenizer.encode_chat(messages, _AT_ONCE).token_ids
