"""Requests with pooling: whether this model can answer them, what the engine computes, and the answer made of that."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.text.model_tasks import EmbeddingForm, ModelTasks, ScoreForm, Unserved
from shared.errors import BadRequestError
from shared.messages import Request
from shared.pooling import Pooling

_SHORTEST_LENGTH = 1e-12


class PooledAnswers:
    """Answers for one model. Keeps no state of its own."""

    def __init__(self, tasks: ModelTasks) -> None:
        self._tasks = tasks

    @property
    def max_tokens(self) -> int | None:
        """Of a text that is embedded or scored; None for as many as the context holds."""
        return self._tasks.max_tokens

    def check(self, request: Request) -> None:
        """Refuse a request for what the model cannot do; the `BadRequestError` names the field and the reason."""
        pooling = request.pooling
        if pooling is None:
            if not self._tasks.generates:
                raise BadRequestError(
                    f"This model generates no text: it can {' and '.join(self._tasks.names)}.", "model"
                )
            return
        asked = (request.emitted, request.echo, request.prediction, request.suffix, request.return_prompt_token_ids)
        if any(asked):
            raise BadRequestError("'pooling' does not go with what says how text is generated.", "pooling")
        if pooling.task == "embed":
            self._check_embedding(pooling)
            if pooling.input_type is not None and request.text is None:
                raise BadRequestError("'input_type' goes with a text.", "input_type")
        else:
            self._check_score(request, pooling)

    def text(self, request: Request) -> str | None:
        """Return the model's words for the use of a vector, and the text; `BadRequestError` for an unknown use."""
        pooling = request.pooling
        if pooling is None or pooling.task != "embed" or request.text is None:
            return request.text
        return self._embedding().prompt_for(pooling.input_type) + request.text

    def plan(self, request: Request) -> PoolingPlan | None:
        """Return what the engine computes for a request that was checked; None for one that generates."""
        if request.pooling is None:
            return None
        if request.pooling.task == "score":
            return self._score().plan
        return self._embedding().plan

    def vector(self, pooling: Pooling, sequence: Sequence) -> bytes:
        """Return the answer to a request whose prompt is computed: numbers of 32 bits, little end first."""
        parts = [np.frombuffer(part, dtype=np.float64) for part in sequence.pooled]
        values: npt.NDArray[np.float64] = np.stack(parts).sum(axis=0)
        if pooling.task == "score":
            answer = np.array([self._activated(values, pooling.raw)])
        else:
            answer = self._embedded(pooling, values, sequence.num_prompt_tokens)
        return answer.astype("<f4").tobytes()

    def _embedded(self, pooling: Pooling, values: npt.NDArray[np.float64], num_tokens: int) -> npt.NDArray[np.float64]:
        form = self._embedding()
        if form.rows == "mean":
            values = values / num_tokens
        for module in form.dense:
            values = module(values)
        values = values[: pooling.dimensions]
        normalizes = form.normalizes if pooling.normalize is None else pooling.normalize
        return values / max(float(np.linalg.norm(values)), _SHORTEST_LENGTH) if normalizes else values

    def _activated(self, values: npt.NDArray[np.float64], is_raw: bool) -> float:
        logit = float(values[-1] - values[0]) if len(values) > 1 else float(values[0])
        # The sigmoid, in a form that no number overflows.
        return logit if is_raw or self._score().activation == "identity" else 0.5 + 0.5 * math.tanh(logit / 2)

    def _check_embedding(self, pooling: Pooling) -> None:
        form = self._tasks.embedding
        if isinstance(form, Unserved):
            raise BadRequestError(f"This model makes no embeddings: {form.reason}.", "model")
        if pooling.query is not None or pooling.instruction is not None:
            raise BadRequestError("'query' and 'instruction' go with the task 'score'.", "pooling")
        if pooling.raw:
            raise BadRequestError("'raw' goes with the task 'score'.", "pooling")
        form.check_dimensions(pooling.dimensions)

    def _check_score(self, request: Request, pooling: Pooling) -> None:
        form = self._tasks.score
        if isinstance(form, Unserved):
            raise BadRequestError(f"This model scores no texts: {form.reason}.", "model")
        if pooling.query is None or request.text is None:
            raise BadRequestError("A score needs 'query' and 'text'.", "query")
        if pooling.dimensions is not None or pooling.normalize is not None or pooling.input_type is not None:
            message = "'dimensions', 'normalize' and 'input_type' go with the task 'embed'."
            raise BadRequestError(message, "dimensions")

    def _embedding(self) -> EmbeddingForm:
        assert isinstance(self._tasks.embedding, EmbeddingForm), "the request was not checked"
        return self._tasks.embedding

    def _score(self) -> ScoreForm:
        assert isinstance(self._tasks.score, ScoreForm), "the request was not checked"
        return self._tasks.score
