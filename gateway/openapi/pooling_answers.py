"""What embeddings, reranking and scores answer."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class PromptUsage(Struct, forbid_unknown_fields=True):
    """Tokens of all texts; none is generated."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, forbid_unknown_fields=True):
    """One vector: numbers, or their 32-bit form in base64, little end first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct, forbid_unknown_fields=True):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class RankedText(Struct, forbid_unknown_fields=True):
    """The text of a document."""

    text: str


class RankedDocument(Struct, forbid_unknown_fields=True):
    """A document by its place in the request, and how relevant it is."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Struct, forbid_unknown_fields=True):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]


class RankedIndex(Struct, forbid_unknown_fields=True):
    """TEI's form, for a body with `texts`: a text by its place in the request, and how relevant it is."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class TextScore(Struct, forbid_unknown_fields=True):
    """The score of one text."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Struct, forbid_unknown_fields=True):
    """The scores of all texts, in their order. `created` is in Unix seconds."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TextScore]
    usage: PromptUsage
