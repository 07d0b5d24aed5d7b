"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`: answers of numbers.

Each sequence's numbers arrive whole in its last delta, and one JSON body is sent when all have come. A vector is
written when it arrives, so that thousands of them in one answer do not hold up other answers at its end.
"""

from __future__ import annotations

import base64
import secrets
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.api.answer import Answer, Asked, StreamParts
from gateway.api.endpoint import Endpoint
from gateway.api.operation import Operation
from gateway.api.output_reading import about
from gateway.errors import ApiError
from gateway.pooling.bodies import EmbeddingsBody, RerankBody, ScoreBody
from gateway.pooling.parsing import EmbeddingsRequest, RerankRequest, parse_embeddings, parse_rerank, parse_score
from shared.messages import Delta

Value = TypeVar("Value", Raw, float)


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


class _NumbersSink:
    __slots__ = ("_answer", "_index")

    def __init__(self, answer: NumbersAnswer[Any], index: int) -> None:
        self._answer = answer
        self._index = index

    def deliver(self, delta: Delta) -> None:
        if delta.finish is None:
            return
        if delta.finish.vector is None:
            # Another version's worker, which does not know what it was asked for.
            self.fail(ApiError(500, "The worker failed at this request.", code="worker_failed"))
            return
        self._answer.note_output()
        self._answer.keep(self._index, delta.finish.vector)
        self._answer.finish_choice(self._index, delta.finish)

    def fail(self, error: ApiError) -> None:
        self._answer.fail_at(self._index, error)


class NumbersAnswer(Answer, Generic[Value]):
    """Base of the answers of numbers."""

    # The body's names for the wire's, and those of them that are lists of what each sequence is for.
    names: Mapping[str, str]
    _listed = frozenset({"input", "documents", "texts", "text_2"})

    def __init__(self, asked: Asked) -> None:
        generation = asked.generation
        super().__init__(asked)
        self._model = generation.name
        self._values: list[Value | None] = [None] * generation.num_sequences
        self.sinks = [_NumbersSink(self, index) for index in range(generation.num_sequences)]

    def keep(self, index: int, vector: bytes) -> None:
        """Take the numbers of one sequence: of 32 bits, little end first."""
        self._values[index] = self._value(vector)

    def fail_at(self, index: int, error: ApiError) -> None:
        """End with the error of one sequence, which names its place where there are several."""
        name = self.names.get(error.param or "")
        if name in self._listed and len(self._values) > 1:
            error = about(error, f"{name}.[{index}]")
        self.fail(error)

    @property
    def values(self) -> list[Value]:
        """The numbers of all sequences; all must have come."""
        values = [value for value in self._values if value is not None]
        assert len(values) == len(self._values)
        return values

    def _report(self, error: ApiError) -> None:
        name = self.names.get(error.param or "")
        super()._report(error if name is None else about(error, name))

    def _complete(self) -> None:
        self._respond(msgspec.json.encode(self._body()))

    def _usage(self) -> PromptUsage:
        return PromptUsage(self.usage.prompt_tokens, self.usage.prompt_tokens)

    @abstractmethod
    def _value(self, vector: bytes) -> Value:
        """Return the value kept for a sequence, from its vector."""

    @abstractmethod
    def _body(self) -> Any:
        """Return the JSON value."""


class EmbeddingsAnswer(NumbersAnswer[Raw]):
    """OpenAI's list of embeddings."""

    names = MappingProxyType({"prompt": "input"})

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        assert isinstance(asked.generation, EmbeddingsRequest)
        self._is_base64 = asked.generation.is_base64

    def _value(self, vector: bytes) -> Raw:
        if self._is_base64:
            return Raw(b'"%s"' % base64.b64encode(vector))
        return Raw(msgspec.json.encode(_numbers(vector)))

    def _body(self) -> EmbeddingList:
        # Each was written as JSON when it arrived.
        data = [Embedding("embedding", index, cast("str", vector)) for index, vector in enumerate(self.values)]
        return EmbeddingList("list", data, self._model, self._usage())


class _ScoresAnswer(NumbersAnswer[float]):
    def _value(self, vector: bytes) -> float:
        return _numbers(vector)[0]


class RerankAnswer(_ScoresAnswer):
    """Jina's and Cohere's list of documents, best first; of equal ones the earlier first."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        assert isinstance(asked.generation, RerankRequest)
        self._request = asked.generation
        self.names = MappingProxyType({"prompt": "texts" if self._request.is_plain_list else "documents"})

    def _body(self) -> Ranking | list[RankedIndex]:
        scores, request = self.values, self._request
        ranking = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
        texts = [request.prompts[index].text or "" if request.returns_documents else UNSET for index in ranking]
        pairs = list(zip(ranking, texts, strict=True))
        if request.is_plain_list:
            return [RankedIndex(index, scores[index], text) for index, text in pairs]
        results = [
            RankedDocument(index, scores[index], UNSET if isinstance(text, UnsetType) else RankedText(text))
            for index, text in pairs
        ]
        return Ranking(f"rerank-{secrets.token_hex(12)}", self._model, self._usage(), results)


class ScoreAnswer(_ScoresAnswer):
    """vLLM's list of scores."""

    names = MappingProxyType({"prompt": "text_2", "query": "text_1"})

    def _body(self) -> ScoreList:
        data = [TextScore(index, "score", score) for index, score in enumerate(self.values)]
        return ScoreList(f"score-{secrets.token_hex(12)}", "list", int(time.time()), self._model, data, self._usage())


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


class _NumbersEndpoint(Endpoint):
    answer: Callable[[Asked], Answer]

    def whole_answer(self, asked: Asked) -> Answer:
        return self.answer(asked)

    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        """Never asked for: no body says `stream`."""
        raise AssertionError("no body asks for a stream")


class EmbeddingsEndpoint(_NumbersEndpoint):
    """Makes vectors of texts."""

    path = "/v1/embeddings"
    name = "embeddings"
    parse = staticmethod(parse_embeddings)
    answer = EmbeddingsAnswer


class RerankEndpoint(_NumbersEndpoint):
    """Ranks documents for a query."""

    path = "/v1/rerank"
    name = "rerank"
    parse = staticmethod(parse_rerank)
    answer = RerankAnswer


class ScoreEndpoint(_NumbersEndpoint):
    """Scores texts for queries."""

    path = "/v1/score"
    name = "score"
    parse = staticmethod(parse_score)
    answer = ScoreAnswer


OPERATIONS = (
    Operation("post", "/v1/embeddings", "Make vectors of texts.", EmbeddingList, EmbeddingsBody),
    Operation("post", "/v1/rerank", "Rank documents for a query.", Ranking | list[RankedIndex], RerankBody),
    Operation("post", "/v1/score", "Score texts for queries.", ScoreList, ScoreBody),
)
