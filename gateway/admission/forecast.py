"""Predicts the effects of an admission: the time to the first token, and by how much the queue is too long for it.

The time is the prompt tokens ahead of a request and its own, over the measured prefill rate, plus the wait for a slot
or KV blocks when none is free. By Little's law sequences leave a busy fleet at `decode_rate / mean output length`
per second, and each leaves the blocks of a mean running sequence. An unknown rate predicts nothing; the queue bounds
always hold.

Rates are measured by workers while they do one thing at a time, and are too high or too low when they do several. What
requests waited, compared with their predictions, corrects all predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from gateway.config import GatewayConfig
from gateway.fleet.fleet_load import FleetLoad
from gateway.fleet.worker_needs import Outlook
from gateway.generation import Generation

# Weight of a new observation in the running means.
_SMOOTHING = 0.02
_FIRST_OUTPUT_TOKENS = 128.0
# Weight of the initial estimate in answers: the first answers to finish are the short ones.
_GUESS_WEIGHT = 16
# Tokens per second: no fleet is slower, and times from rates that a worker makes up stay finite.
_LEAST_RATE = 1e-3
# Seconds after which an observed wait counts a third: half of the time for which places are promised.
_WAITS_FADE_S = 30.0
# Predicted waits that are shorter tell more of the gateway's own time than of the fleet's, and
_SHORTEST_WAIT_S = 0.5
# one request may have waited for another reason, such as the death of its worker.
_LARGEST_RATIO = 4.0
# Seconds of waiting that have come true before there was any: a few requests do not change predictions by much.
_TRUSTED_WAIT_S = 30.0
# Predictions tell of the fleet's rates when the length of answers is known: after this many.
_MATURE_ANSWERS = 64
# A correction by more than that is not an error of a measurement.
_LARGEST_CORRECTION = 2.0


@dataclass(slots=True)
class Experience:
    """Running means over finished answers of one model, written by the shedder."""

    tokens_per_estimate: float = 1.0
    output_tokens: float = _FIRST_OUTPUT_TOKENS
    num_answers: int = 0
    waited_s: float = 0.0
    predicted_s: float = 0.0
    learned_at: float = 0.0

    @property
    def correction(self) -> float:
        """Ratio of observed waits to those predicted from the fleet's rates: 1 where these are true."""
        ratio = (_TRUSTED_WAIT_S + self.waited_s) / (_TRUSTED_WAIT_S + self.predicted_s)
        return min(_LARGEST_CORRECTION, max(1 / _LARGEST_CORRECTION, ratio))

    def learn_wait(self, predicted_s: float, waited_s: float, now: float) -> None:
        """Learn from the wait of one request. Times are seconds, `now` is monotonic.

        `predicted_s` is by the fleet's rates alone: corrected predictions would correct themselves twice.
        """
        if predicted_s < _SHORTEST_WAIT_S:
            return
        kept = math.exp(min(0.0, self.learned_at - now) / _WAITS_FADE_S)
        self.learned_at = now
        self.predicted_s = kept * self.predicted_s + predicted_s
        self.waited_s = kept * self.waited_s + min(max(0.0, waited_s), _LARGEST_RATIO * predicted_s)

    def learn(self, prompt_ratio: float | None, output_tokens: float | None) -> None:
        """Take in one answer: true prompt tokens per estimated one, and the output of a sequence, where known."""
        self.num_answers += 1
        # The plain mean at first; then the running one.
        weight = max(_SMOOTHING, 1 / (self.num_answers + _GUESS_WEIGHT))
        if prompt_ratio is not None:
            self.tokens_per_estimate += weight * (min(prompt_ratio, 10.0) - self.tokens_per_estimate)
        if output_tokens is not None:
            self.output_tokens += weight * (output_tokens - self.output_tokens)


# A tenant may hold at most this multiple of the free places in the queue.
_TENANT_MULTIPLE = 7


class Excess(Struct, frozen=True):
    """One bound on the queue, and by how many seconds of draining it is exceeded; negative while there is room.

    Attributes:
        text: Template of the client's message, with a place for each of `values`; filled in only when it is sent.
        is_exceeded: Also where the rate is unknown and `seconds` is therefore 0.
        is_elastic: A client that was promised a place may exceed it a little.
    """

    reason: str
    text: str
    values: tuple[object, ...]
    seconds: float
    is_exceeded: bool
    is_elastic: bool = True

    @property
    def message(self) -> str:
        """The message to the client."""
        return self.text.format(*self.values)


class Forecast(Struct, frozen=True):
    """The predicted times of one request. Seconds.

    Attributes:
        wait_s: Until the last of its sequences is begun.
        first_wait_s: Until the first of them is begun.
        uncorrected_wait_s: `first_wait_s` by the fleet's rates alone; 0 while too little is known to learn from it.
        own_s: For its prompt.
        cost_s: Time in which the whole fleet does as much work as the request brings; 0 while rates are unknown.
        excess: The bound that is exceeded most, or has the least room.
    """

    wait_s: float
    first_wait_s: float
    uncorrected_wait_s: float
    own_s: float
    cost_s: float
    excess: Excess


def forecast(load: FleetLoad, generation: Generation, experience: Experience, config: GatewayConfig) -> Forecast:
    """Predict the times of a request, and the excess, under the present load."""
    ratio = experience.tokens_per_estimate
    own_tokens = sum([load.prompt_tokens(prompt.estimated_tokens * ratio) for prompt in generation.prompts])
    own_s = _prefill_s(load, own_tokens)
    correction = experience.correction
    departure_s = correction * _departure_s(load, experience)
    queue_s = correction * _prefill_s(load, load.queued_tokens)
    first_wait_s = queue_s + _capacity_wait_s(load, 1, own_tokens, departure_s)
    # Sequences that generate nothing leave once their prompts are computed, and do not wait for each other's slots.
    num_slots = 1 if generation.pooling is not None else generation.num_at_once
    wait_s = queue_s + _capacity_wait_s(load, num_slots, own_tokens, departure_s)
    excess = _time(generation.timeout_s, wait_s, own_s, config.interactive_ttft_slo_s)
    # Queue limits do not apply while the queue is empty.
    if load.queued_requests > 0:
        requests = _requests(load, generation.num_at_once, departure_s, config.max_queued_requests)
        excess = _worst(requests, _tokens(load, own_tokens, config.max_queued_tokens), excess)
    decode_s = generation.num_sequences * departure_s if generation.pooling is None else 0.0
    uncorrected_s = first_wait_s / correction if experience.num_answers >= _MATURE_ANSWERS else 0.0
    return Forecast(wait_s, first_wait_s, uncorrected_s, own_s, max(own_s, decode_s), excess)


def outlook(load: FleetLoad, experience: Experience) -> Outlook:
    """Predict the wait of a short request that comes now, for autoscaling."""
    correction = experience.correction
    departure_s = correction * _departure_s(load, experience)
    wait_s = correction * _prefill_s(load, load.queued_tokens) + _capacity_wait_s(load, 1, 0, departure_s)
    return Outlook(wait_s, departure_s)


def tenant_excess(load: FleetLoad, num_sequences: int, num_own: int, cost_s: float, max_requests: int) -> Excess | None:
    """Return by how much a tenant's own requests exceed what it may let wait; None while they do not.

    That is seven times the places that are free, as in `gateway.shares`: others find one eighth of them free. Of the
    tenant's `num_own` requests here, the fleet can run as many as it has slots.
    """
    num_waiting = num_own - load.num_slots
    excess = num_waiting + num_sequences - _TENANT_MULTIPLE * max(0, max_requests - load.queued_requests)
    if num_waiting <= 0 or excess <= 0:
        return None
    # Each that leaves the queue makes room, and is one less of the tenant's.
    seconds = cost_s * excess / (_TENANT_MULTIPLE + 1)
    text = "{} of your tenant's requests are waiting for `{}` already, and the places left are for others'."
    return Excess("queue_full", text, (num_waiting, load.model), seconds, is_exceeded=True)


def _worst(requests: Excess, tokens: Excess, time: Excess) -> Excess:
    """Return the first bound that is exceeded, with the time until none is; without any, the nearest one."""
    exceeded = [bound for bound in (requests, tokens, time) if bound.is_exceeded]
    if exceeded:
        seconds = max(requests.seconds, tokens.seconds, time.seconds)
        return replace(exceeded[0], seconds=seconds, is_elastic=all(bound.is_elastic for bound in exceeded))
    nearest = time
    for bound in (requests, tokens):
        # How far a bound is away in time is 0 while the rate is unknown, which is not near.
        if nearest.seconds < bound.seconds < 0:
            nearest = bound
    return nearest


def _time(timeout_s: float | None, wait_s: float, own_s: float, slo_s: float) -> Excess:
    # A prompt's own time is not congestion: it takes at most half of the objective, so that an idle fleet serves a
    # prompt of any length.
    seconds = wait_s + (min(own_s, slo_s / 2) - slo_s if timeout_s is None else own_s - timeout_s)
    text = "The first token would take about {:.1f} s at the present load."
    return Excess("overloaded", text, (wait_s + own_s,), seconds, seconds > 0, is_elastic=timeout_s is None)


def _requests(load: FleetLoad, num_sequences: int, departure_s: float, max_requests: int) -> Excess:
    excess = load.queued_requests + num_sequences - max_requests
    values = load.queued_requests, load.model
    seconds = excess * max(_prefill_s(load, load.queued_tokens / load.queued_requests), departure_s)
    return Excess("queue_full", "{} requests are waiting for `{}` already.", values, seconds, excess > 0)


def _tokens(load: FleetLoad, own_tokens: float, max_tokens: int) -> Excess:
    excess = load.queued_tokens + own_tokens - max_tokens
    values, text = (load.queued_tokens, load.model), "{} prompt tokens are waiting for `{}` already."
    return Excess("queue_full", text, values, _prefill_s(load, excess), excess > 0)


def _prefill_s(load: FleetLoad, num_tokens: float) -> float:
    """Predict the time for prompts of `num_tokens`; 0 while the rate is unknown."""
    return num_tokens / max(load.prefill_rate, _LEAST_RATE) if load.prefill_rate > 0 else 0.0


def _departure_s(load: FleetLoad, experience: Experience) -> float:
    """Predict the time between two sequences that leave a busy fleet; 0 while the rate is unknown."""
    rate = max(load.decode_rate, _LEAST_RATE)
    return max(1.0, experience.output_tokens) / rate if load.decode_rate > 0 else 0.0


def _capacity_wait_s(load: FleetLoad, num_sequences: int, own_tokens: float, departure_s: float) -> float:
    """Predict how long the sequences ahead and `num_sequences` of this request wait for slots and blocks in use.

    More sequences than the fleet has slots wait for each other, which is not congestion.

    Slots count although the load may say that nothing runs: it is as old as the last heartbeats, while the queue
    counts requests of this very moment.
    """
    missing_slots = load.queued_requests + min(num_sequences, load.free_slots + load.running) - load.free_slots
    missing_slots = max(missing_slots, load.queued_requests + 1 - load.free_slots)
    if load.running == 0:
        return max(0.0, missing_slots) * departure_s
    missing_blocks = (load.queued_tokens + own_tokens) / load.block_size - load.free_blocks
    blocks_each = max(1.0, (load.total_blocks - load.free_blocks) / load.running)
    return max(0.0, missing_slots, missing_blocks / blocks_each) * departure_s
