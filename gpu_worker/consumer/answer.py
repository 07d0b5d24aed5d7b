"""Turns what the engine says about a sequence into a delta: tokens to text, logprobs, stop strings, the end.

The end by a stop string is found here, not in the engine: the text is cut before it, and tokens after the one that
completed it are dropped.

Requests with pooling: whether this model can answer them, what the engine computes, and the answer made of that.
"""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np
import numpy.typing as npt

from gpu_worker.consumer.held_request import HeldRequest, Prelude
from gpu_worker.consumer.request_observer import ReceiptWriter
from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SequenceEvent
from gpu_worker.text.model_tasks import EmbeddingForm, ModelTasks, ScoreForm, Unserved
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError
from shared.grammar import GRAMMAR_PARAM, GrammarError
from shared.kv_budget import EvictedBlocks
from shared.messages import Delta, Finish, FinishReason, Request, TokenLogprob, Usage
from shared.pooling import Pooling
from shared.receipt import Timing
from shared.sampling import Sampling

_NOTHING = Prelude()

_NO_TOKEN = str(InvalidLogitsError())


class AnswerWriter:
    """Writes deltas. Advances the text of held requests and their preludes; nothing else."""

    def __init__(self, tokenizer: ModelTokenizer, pooled: PooledAnswers, receipts: ReceiptWriter | None = None) -> None:
        self._receipts = receipts or ReceiptWriter()
        self._tokenizer = tokenizer
        self._pooled = pooled

    def delta(self, held: HeldRequest, event: SequenceEvent) -> Delta:
        """Return the delta of one event.

        Where its `finish` is set and the event's is not, a stop string has ended the answer: abort the sequence.
        """
        request = held.request
        token_ids = event.token_ids
        if held.is_plain and event.finish is None and len(token_ids) == 1:
            assert held.output is not None
            text = held.output.feed(token_ids[0])
            return Delta(request.id, request.epoch, event.num_tokens_before, token_ids, text)
        return self._full_delta(held, event)

    def _full_delta(self, held: HeldRequest, event: SequenceEvent) -> Delta:
        request = held.request
        text, num_tokens, reason = self._read(held, event)
        finish = None
        if reason is not None:
            finish = self._finish(held, event, reason, num_tokens)
            held.outcome = finish.reason
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(to_token_logprob(self._tokenizer, entry) for entry in event.logprobs[:num_tokens])
        prelude = self._prelude(held, event, is_due=num_tokens > 0 or finish is not None)
        if finish is not None:
            num_output_tokens = event.num_tokens_before + num_tokens
            finish = msgspec.structs.replace(finish, receipt=self._receipts.receipt(held, num_output_tokens))
        return Delta(
            request.id,
            request.epoch,
            event.num_tokens_before,
            event.token_ids[:num_tokens],
            prelude.text + text,
            finish,
            logprobs,
            None if prelude.logprobs is None else tuple(prelude.logprobs),
            prompt_token_ids=prelude.token_ids,
            evicted=self._evicted(held) if num_tokens else None,
        )

    @staticmethod
    def _evicted(held: HeldRequest) -> EvictedBlocks | None:
        """Return the evictions since the last delta with tokens; later tokens did not attend to these."""
        sequence = held.sequence
        if sequence is None or sequence.scores is None or sequence.budget is None:
            return None
        evicted = sequence.scores.told(held.num_told_evictions)
        if evicted is not None:
            held.num_told_evictions += len(evicted.places) // sequence.budget.num_evicted
        return evicted

    def _read(self, held: HeldRequest, event: SequenceEvent) -> tuple[str, int, FinishReason | None]:
        """Return the new text, how many of the event's tokens count, and why the answer ends, if it does."""
        output = held.output
        assert output is not None
        num_tokens = len(event.token_ids)
        # A stop token has no text; the last token of a complete grammar has.
        is_stopped = event.finish == "stop" and num_tokens and event.token_ids[-1] in event.sequence.stop_ids
        num_read = num_tokens - 1 if is_stopped else num_tokens
        parts = []
        for index in range(num_read):
            parts.append(output.feed(event.token_ids[index]))
            if output.is_stopped:
                return "".join(parts), index + 1, "stop"
        if event.finish in ("stop", "length"):
            parts.append(output.finish())
        return "".join(parts), num_tokens, event.finish

    def _finish(self, held: HeldRequest, event: SequenceEvent, reason: FinishReason, num_tokens: int) -> Finish:
        sequence = event.sequence
        num_output_tokens = event.num_tokens_before + num_tokens
        # The engine has also counted drafts behind a stop string, which it does not know.
        num_accepted = min(sequence.num_accepted_tokens, num_output_tokens)
        num_rejected = sequence.num_drafted_tokens - num_accepted
        ready, num_cached = held.request.ready, sequence.num_cached_tokens
        if ready is not None:
            # Its prompt was computed for it by another worker.
            num_cached = min(num_cached, ready.cached_tokens)
        counts, num_evicted = (num_output_tokens, num_cached), sequence.num_evicted_at(num_output_tokens)
        policy = sequence.budget.policy if sequence.budget is not None and num_evicted else ""
        usage = Usage(sequence.num_prompt_tokens, *counts, num_accepted, num_rejected, num_evicted, policy)
        pooling = held.request.pooling
        if pooling is not None and reason == "length":
            # Its prompt is computed, which is all that was wanted.
            return Finish("stop", usage, vector=self._pooled.vector(pooling, sequence), timing=_timing(held))
        refused = refused_end(event, held.request.sampling) if reason == "failed" else None
        if refused is not None:
            return Finish(reason, usage, str(refused), error_param=refused.param, error_code=refused.code)
        return Finish(reason, usage, event.error, stop=_stop(held, event, reason), timing=_timing(held))

    def _prelude(self, held: HeldRequest, event: SequenceEvent, *, is_due: bool) -> Prelude:
        """Return the data about the prompt when due, with the first token or the end; else nothing."""
        prelude = held.prelude
        if prelude is None:
            return _NOTHING
        if prelude.logprobs is not None:
            prelude.logprobs += [to_token_logprob(self._tokenizer, entry) for entry in event.prompt_logprobs]
        if not is_due:
            return _NOTHING
        held.prelude, held.first_output_at = None, time.monotonic()
        sampling = held.request.sampling
        is_scored = held.sequence is not None and held.sequence.scores is not None
        held.is_plain = not (sampling.stop or is_scored) and sampling.logprobs is None
        return prelude


def _timing(held: HeldRequest) -> Timing | None:
    """Return how long the sequence took here; None where it was never in a step."""
    scheduled_at = None if held.sequence is None else held.sequence.scheduled_at
    if scheduled_at is None:
        return None
    now = time.monotonic()
    first = now if held.first_output_at is None else held.first_output_at
    return Timing(max(0.0, first - scheduled_at), now - first)


def _stop(held: HeldRequest, event: SequenceEvent, reason: FinishReason) -> str | int | None:
    if reason != "stop":
        return None
    if held.output is not None and held.output.stop_string is not None:
        return held.output.stop_string
    last = event.token_ids[-1] if event.token_ids else None
    return last if last in held.request.sampling.stop_token_ids else None


def announcement(held: HeldRequest) -> Delta:
    """Return a delta that says nothing but who holds the request: its prompt is not read yet, or it waits."""
    return Delta(held.request.id, held.request.epoch, held.num_output_tokens)


def claim(held: HeldRequest, num_prompt_tokens: int) -> Delta:
    """Return the first delta of an attempt: the gateway learns from its frame which worker holds the request."""
    request = held.request
    seq = len(request.emitted)
    return Delta(request.id, request.epoch, seq, prompt_tokens=num_prompt_tokens, in_reasoning=held.in_reasoning)


def ending(held: HeldRequest, finish: Finish) -> Delta:
    """Return a last delta without tokens, which follows those that were put into the outbox.

    The engine may be ahead of them: outcomes that have not been accepted yet will find the request gone.
    """
    held.outcome = finish.reason
    return Delta(held.request.id, held.request.epoch, held.num_output_tokens, finish=finish)


def refused_end(event: SequenceEvent, sampling: Sampling) -> BadRequestError | None:
    """Return why the request of a sequence that failed cannot be obeyed; None for a fault of this worker."""
    error = event.error or ""
    constraint = event.sequence.constraint
    if constraint is not None and constraint.is_at_fault and error == constraint.error:
        return GrammarError(f"{error}.", param=GRAMMAR_PARAM)
    if not error.endswith(_NO_TOKEN):
        return None
    # A single one of these leaves some token wherever it is accepted.
    forbidding = {
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words),
        "the grammar of the answer": sampling.grammar is not None,
    }
    names = [name for name, is_given in forbidding.items() if is_given]
    if len(names) < 2:
        return None
    message = f"{names[0]}: together with {' and '.join(names[1:])} it leaves no token here. Loosen one of them."
    return BadRequestError(message, names[0])


def to_token_logprob(tokenizer: ModelTokenizer, entry: LogprobEntry) -> TokenLogprob:
    """Return the wire form of one token's log probability, with its alternatives."""
    shown = tokenizer.shown_token
    top = tuple([TokenLogprob(token_id, *shown(token_id), logprob) for token_id, logprob in entry.top])
    return TokenLogprob(entry.token_id, *shown(entry.token_id), entry.logprob, top)


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
