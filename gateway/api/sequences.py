"""The sequences of one answer: a wire request for each choice and prompt, and a bounded number in flight at once.

The next one is dispatched when one has ended. So an answer of thousands of sequences takes no more of the queue than an
ordinary one, and others come in between.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from gateway.admission.caller import Caller
from gateway.dispatch.inflight import Flight, new_key
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from shared.messages import Delta, Request
from shared.sampling import Sampling

# Of an id, before the number of the sequence: the request's key, and another one.
_BASE_CHARACTERS = 16


class SequenceWindow:
    """The sequences of one answer."""

    def __init__(
        self,
        submit: Callable[[int, Sink], Flight],
        cancel: Callable[[Iterable[Flight]], None],
        sinks: Sequence[Sink],
        size: int,
    ) -> None:
        self.flights: list[Flight] = []
        self._submit = submit
        self._cancel = cancel
        self._sinks = list(sinks) if len(sinks) <= size else [_CountedSink(self, sink) for sink in sinks]
        self._size = size
        self._is_open, self._is_promised = True, False

    def begin(self) -> None:
        """Dispatch the first sequences.

        Raises:
            ApiError: One cannot be queued; none is dispatched then.
        """
        try:
            for sink in self._sinks[: self._size]:
                self.flights.append(self._submit(len(self.flights), sink))
        except BaseException:
            self.cancel()
            raise

    def advance(self) -> None:
        """Dispatch the next sequence if there is one: one has ended."""
        place = len(self.flights)
        if not self._is_open or place == len(self._sinks):
            return
        try:
            flight = self._submit(place, self._sinks[place])
        except ApiError as error:
            self._sinks[place].fail(error)
            return
        if self._is_promised:
            flight.is_promised = True
        self.flights.append(flight)

    def promise(self) -> None:
        """Let no sequence be refused any more while NATS is away: the client knows that the answer has begun."""
        self._is_promised = True
        for flight in self.flights:
            flight.is_promised = True

    def stop(self) -> None:
        """Dispatch nothing more."""
        self._is_open = False

    def cancel(self) -> None:
        """Stop all sequences; those that have ended are left alone."""
        self._is_open = False
        self._cancel(self.flights)


class _CountedSink:
    __slots__ = ("_sink", "_window")

    def __init__(self, window: SequenceWindow, sink: Sink) -> None:
        self._window = window
        self._sink = sink

    def deliver(self, delta: Delta) -> None:
        self._sink.deliver(delta)
        if delta.finish is not None:
            self._window.advance()

    def fail(self, error: ApiError) -> None:
        self._window.stop()
        self._sink.fail(error)


def wire_requests(
    generation: Generation, caller: Caller, reply: str, timeout_s: float | None, now: float | None = None
) -> list[Request]:
    """Return the requests of all choices, in their order.

    `now` is in Unix seconds at the server, this machine's if not given. Ids begin with the caller's `request_key`, or
    with a new one.
    """
    now = time.time() if now is None else now
    base = (caller.request_key or new_key()) + new_key()
    whole = Request(
        id=base,
        model=generation.served_model,
        adapter=generation.adapter,
        tenant=caller.tenant,
        lane=generation.lane,
        priority=generation.priority,
        deadline=None if timeout_s is None else now + timeout_s,
        sampling=generation.sampling,
        reply=reply,
        echo=generation.echo,
        created=now,
        trace=caller.request_id,
        traceparent=caller.traceparent,
        key=caller.key_id,
        weight=caller.weight,
        prediction=generation.prediction,
        pooling=generation.pooling,
        add_special_tokens=generation.add_special_tokens,
        truncate_prompt_tokens=generation.truncate_prompt_tokens,
        cache_salt=generation.cache_salt,
        cache_hints=generation.cache_hints,
        kv_budget=generation.kv_budget,
        return_prompt_token_ids=generation.details is not None and generation.details.needs_prompt_ids,
    )
    choices = itertools.product(generation.prompts, range(generation.n))
    return [_of_prompt(whole, number, prompt, choice) for number, (prompt, choice) in enumerate(choices)]


def numbered_requests(firsts: Iterable[Request], n: int) -> list[Request]:
    """Return the requests of all choices: `n` for each of these, which are the first choices of their prompts."""
    requests: list[Request] = []
    for first in firsts:
        base = first.id[:_BASE_CHARACTERS]
        for choice in range(n):
            sampling = _of_choice(first.sampling, choice)
            requests.append(msgspec.structs.replace(first, id=f"{base}-{len(requests)}", sampling=sampling))
    return requests


def _of_prompt(whole: Request, number: int, prompt: Prompt, choice: int) -> Request:
    pooling = whole.pooling
    if pooling is not None and prompt.query is not None:
        pooling = msgspec.structs.replace(pooling, query=prompt.query)
    return msgspec.structs.replace(
        whole,
        id=f"{whole.id}-{number}",
        messages=prompt.messages,
        chat=prompt.chat,
        text=prompt.text,
        token_ids=prompt.token_ids,
        suffix=prompt.suffix,
        media=prompt.media,
        sampling=_of_choice(whole.sampling, choice),
        pooling=pooling,
    )


def _of_choice(sampling: Sampling, choice: int) -> Sampling:
    # Seeds are 64-bit signed integers on the wire.
    seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed) if choice else sampling
