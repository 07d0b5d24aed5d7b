"""Overload, answered before it costs anything: predict the time to first token, and refuse what would come too late.

The prediction is the prompt tokens ahead of a request and its own, over the measured prefill rate, plus the wait for a
slot or KV blocks when none is free. By Little's law sequences leave a busy fleet at `decode_rate / mean output length`
per second, and each leaves the blocks of a mean running sequence. A refusal says when to return: the excess over what
is bearable, divided by the rate at which it drains. An unknown rate predicts nothing; the queue bounds always hold.

Whoever is refused is told to return behind those who were refused before: otherwise all would come back at once, and
all but the first would have been lied to.

Owns two running means per model, learnt from finished answers (true prompt tokens per estimated one, and the output
length of a sequence), and until when the capacity is promised to the refused.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.errors import ApiError, model_not_found
from gateway.generation import Generation
from gateway.load import FleetLoad
from gateway.metrics import GatewayMetrics

JITTER = 0.25
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 2.0

# Weight of a new observation in the running means.
_SMOOTHING = 0.05
_FIRST_OUTPUT_TOKENS = 128.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was expected of an admitted request; `ttft_s` is None while the fleet's rates are unknown."""

    model: str
    ttft_s: float | None
    estimated_prompt_tokens: int
    num_sequences: int


class _ExcessError(Exception):
    """More than the fleet can bear, and how long it takes to drain; 0 if that is unknown."""

    def __init__(self, reason: str, message: str, drain_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.drain_s = drain_s


@dataclass(slots=True)
class _Experience:
    """What answers of one model have taught."""

    tokens_per_estimate: float = 1.0
    output_tokens: float = _FIRST_OUTPUT_TOKENS
    num_answers: int = 0
    promised_until: float = 0.0


class Shedder:
    """Admits requests while the fleet can serve them in time."""

    def __init__(
        self,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        uniform: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Refuse by the configuration's objective and queue bounds; `uniform` draws jitter from [0, 1)."""
        self._slo_s = config.interactive_ttft_slo_s
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._metrics = metrics
        self._uniform = uniform
        self._clock = clock
        self._experience: dict[str, _Experience] = {}

    def admit(self, load: FleetLoad | None, generation: Generation) -> Prediction:
        """Predict a request's time to first token, and refuse it if that is too long.

        Args:
            load: The model's fleet now; None for a model nobody has heard of.
            generation: What is asked for.

        Raises:
            ApiError: 404 for an unknown model; 503 with `no_worker`, `queue_full` or `overloaded`; 400 when the
                request's own timeout is too short for its prompt even on an idle fleet.
        """
        if load is None:
            raise model_not_found(generation.model)
        if load.num_workers == 0:
            raise self._refusal("no_worker", f"No worker serves `{load.model}` at the moment.", UNKNOWN_RETRY_S)
        experience = self._experience.setdefault(load.model, _Experience())
        own_tokens = generation.estimated_prompt_tokens * experience.tokens_per_estimate
        own_s = _prefill_s(load, own_tokens)
        cost_s = max(own_s, generation.num_sequences * _departure_s(load, experience))
        try:
            self._check_queue(load, generation.num_sequences, own_tokens, experience)
            wait_s = _prefill_s(load, load.queued_tokens) + _capacity_wait_s(load, own_tokens, experience)
            self._check_time(generation.timeout_s, wait_s, own_s)
        except _ExcessError as excess:
            retry_after_s = self._promise(experience, excess.drain_s or UNKNOWN_RETRY_S, cost_s)
            raise self._refusal(excess.reason, str(excess), retry_after_s) from None
        ttft_s = wait_s + own_s if load.prefill_rate > 0 or load.decode_rate > 0 else None
        return Prediction(load.model, ttft_s, generation.estimated_prompt_tokens, generation.num_sequences)

    def observe(
        self, prediction: Prediction, actual_ttft_s: float, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        """Learn from a finished answer.

        Args:
            prediction: As `admit` returned it.
            actual_ttft_s: Measured at the gateway.
            prompt_tokens: As the worker counted them, over all prompts; 0 if it has not said.
            completion_tokens: Over all sequences.
        """
        if prediction.ttft_s is not None:
            self._metrics.prediction_error_s.observe(actual_ttft_s - prediction.ttft_s)
        experience = self._experience[prediction.model]
        experience.num_answers += 1
        # The plain mean at first, in which the guess counts as one answer; then the running one.
        weight = max(_SMOOTHING, 1 / (experience.num_answers + 1))
        if prompt_tokens:
            ratio = prompt_tokens / max(1, prediction.estimated_prompt_tokens)
            experience.tokens_per_estimate += weight * (min(ratio, 10.0) - experience.tokens_per_estimate)
        if completion_tokens:
            output = completion_tokens / prediction.num_sequences
            experience.output_tokens += weight * (output - experience.output_tokens)

    def _check_queue(self, load: FleetLoad, sequences: int, own_tokens: float, experience: _Experience) -> None:
        excess = load.queued_requests + sequences - self._max_requests
        if excess > 0 and load.queued_requests > 0:
            message = f"{load.queued_requests} requests are waiting for `{load.model}` already."
            tokens_each = load.queued_tokens / load.queued_requests
            drain_s = max(_prefill_s(load, excess * tokens_each), excess * _departure_s(load, experience))
            raise _ExcessError("queue_full", message, drain_s)
        excess_tokens = load.queued_tokens + own_tokens - self._max_tokens
        if excess_tokens > 0 and load.queued_tokens > 0:
            message = f"{load.queued_tokens} prompt tokens are waiting for `{load.model}` already."
            raise _ExcessError("queue_full", message, _prefill_s(load, excess_tokens))

    def _check_time(self, timeout_s: float | None, wait_s: float, own_s: float) -> None:
        if timeout_s is not None:
            if own_s > timeout_s and wait_s == 0:
                message = f"The prompt alone takes about {own_s:.1f} s here; 'timeout' is {timeout_s:g} s."
                raise ApiError(400, message, param="timeout", code="timeout_too_short")
            excess_s = wait_s + own_s - timeout_s
        else:
            # A prompt's own time is nobody's congestion: it takes at most half of the objective, so that a prompt of
            # any length is served by an idle fleet.
            excess_s = wait_s + min(own_s, self._slo_s / 2) - self._slo_s
        if excess_s > 0:
            message = f"The first token would take about {wait_s + own_s:.1f} s at the present load."
            raise _ExcessError("overloaded", message, excess_s)

    def _promise(self, experience: _Experience, drain_s: float, cost_s: float) -> float:
        """Return when to come back: when the excess has drained, and behind those who were told so before."""
        now = self._clock()
        wait_s = min(MAX_RETRY_S, max(drain_s, experience.promised_until - now))
        experience.promised_until = now + wait_s + cost_s
        return wait_s

    def _refusal(self, reason: str, message: str, retry_after_s: float) -> ApiError:
        self._metrics.shed[reason] += 1
        jittered = retry_after_s * (1 - JITTER + 2 * JITTER * self._uniform())
        retry_after_s = min(MAX_RETRY_S, max(1.0, jittered))
        text = f"{message} Try again in {retry_after_s:.0f} s."
        return ApiError(503, text, code=reason, retry_after_s=retry_after_s)


def _prefill_s(load: FleetLoad, num_tokens: float) -> float:
    """Predict how long prompts of so many tokens take; 0 while the rate is unknown."""
    return num_tokens / load.prefill_rate if load.prefill_rate > 0 else 0.0


def _departure_s(load: FleetLoad, experience: _Experience) -> float:
    """Predict the time between two sequences that leave a busy fleet; 0 while the rate is unknown."""
    return max(1.0, experience.output_tokens) / load.decode_rate if load.decode_rate > 0 else 0.0


def _capacity_wait_s(load: FleetLoad, own_tokens: float, experience: _Experience) -> float:
    """Predict how long the requests ahead and this one wait for slots and blocks that other sequences hold.

    Slots count although the load may say that nothing runs: it is as old as the last heartbeats, while the queue
    counts requests of this very moment.
    """
    departure_s = _departure_s(load, experience)
    missing_slots = load.queued_requests + 1 - load.free_slots
    if load.running == 0:
        return max(0.0, missing_slots) * departure_s
    missing_blocks = (load.queued_tokens + own_tokens) / load.block_size - load.free_blocks
    blocks_each = max(1.0, (load.total_blocks - load.free_blocks) / load.running)
    return max(0.0, missing_slots, missing_blocks / blocks_each) * departure_s
