"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`."""

from __future__ import annotations

from collections.abc import Callable

from gateway.api.answer import Answer, Asked, StreamParts
from gateway.api.endpoint import Endpoint
from gateway.api.operation import Operation
from gateway.pooling.answers import (
    EmbeddingList,
    EmbeddingsAnswer,
    RankedIndex,
    Ranking,
    RerankAnswer,
    ScoreAnswer,
    ScoreList,
)
from gateway.pooling.bodies import EmbeddingsBody, RerankBody, ScoreBody
from gateway.pooling.parsing import parse_embeddings, parse_rerank, parse_score


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
