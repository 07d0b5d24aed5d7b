"""From an admitted generation to its deltas: repeated from the cache, or new.

Only new generations are checked against the fleet's capacity: repeating an answer costs none. While nothing runs and
nothing waits, a short prompt is dispatched before Redis has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from gateway.admission.caller import Caller
from gateway.admission.shedding import Prediction, Shedder
from gateway.aliases.book import LogprobTap
from gateway.api.model_fit import check_budget, check_length, check_task
from gateway.api.output_reading import StructuredOutputAdmission
from gateway.api.sequences import SequenceWindow, wire_requests
from gateway.cache.prompt_cache import CacheKey, PromptCache, cache_key
from gateway.cache.recording import Recording, tokens_so_far
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.inflight import Flight
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from shared.background_tasks import BackgroundTasks
from shared.messages import Delta, Request

# Prompts of which a step computes all; beside the time for a longer prompt, that for a question to Redis is nothing.
MAX_SPECULATIVE_TOKENS = 256


class Membership(Struct, frozen=True):
    """A client's part in a generation.

    Attributes:
        leave: Ends it, and cancels the generation unless it goes on without a client. To be called once, at the end.
        delivered: Prompt and generated tokens so far, each prompt counted once; for an answer that did not finish.
        prediction: The shedder's, if the generation is new.
        is_repeated: The answer came from the cache.
        num_reserved: Tokens that its job may use; 0 if delivered tokens are counted.
        is_counted: Somebody else counts its tokens when the generation has ended, which may be later than the answer.
    """

    leave: Callable[[], None] = lambda: None
    delivered: Callable[[], tuple[int, int]] = lambda: (0, 0)
    prediction: Prediction | None = None
    is_repeated: bool = False
    num_reserved: int = 0
    is_counted: bool = False

    @property
    def is_counted_elsewhere(self) -> bool:
        """Whether the answer's tokens are counted by others: by the worker that has its job, or by a log."""
        return self.num_reserved > 0 or self.is_counted

    def tokens_used(self) -> int:
        """Return the tokens that an unfinished answer counts against its key's limit per minute."""
        return self.num_reserved + sum(self.delivered())


class GenerationStarter:
    """Starts generations on behalf of answers."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        shedder: Shedder,
        cache: PromptCache,
        grammars: StructuredOutputAdmission,
        metrics: GatewayMetrics,
        timeout_s: float,
    ) -> None:
        self._grammars = grammars
        self._dispatcher = dispatcher
        self._shedder = shedder
        self._cache = cache
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._tasks = BackgroundTasks()

    async def start(
        self, generation: Generation, load: FleetLoad, caller: Caller, sinks: Sequence[Sink], is_fresh: bool
    ) -> Membership:
        """Let the deltas of a generation flow into `sinks`, one per sequence.

        `is_fresh`: the client wants a new generation, not a repeated answer.

        Raises:
            ApiError: It was not admitted, or cannot be queued. Later failures go to the sinks.
        """
        generation = await self.checked(generation, load, caller.tenant)
        if not generation.deterministic or is_fresh:
            return self._new(*await self.dispatch(generation, caller, sinks), generation.n)
        key = cache_key(caller.tenant, generation, load.revisions)
        recording = Recording(sinks, partial(self._keep, key, generation.served_model))
        cached = self._cache.remembered(key)
        if cached is None and _is_free(self._dispatcher.fleet.load(generation.served_model), generation):
            return await self._start_at_once(recording, key, generation, caller, sinks)
        if cached is None:
            cached = await self._cache.get(key)
        if cached is not None and len(cached) == len(sinks):
            return self._repeated(cached, sinks, generation.n)
        self._metrics.cache_misses += 1
        return self._new(*await self.dispatch(generation, caller, recording.sinks), generation.n)

    def requests(self, generation: Generation, caller: Caller) -> list[Request]:
        """Return the wire requests of a generation."""
        dispatcher, timeout_s = self._dispatcher, generation.timeout_s or self._timeout_s
        return wire_requests(generation, caller, dispatcher.reply, timeout_s, dispatcher.clock.now())

    async def checked(self, generation: Generation, load: FleetLoad, tenant: str) -> Generation:
        """Return a generation that its model's workers can compute, with a grammar that can be obeyed.

        Raises:
            ApiError: 400 for a task that none of them serves, for a prompt that is too long for them, or a grammar
                that cannot be obeyed.
        """
        check_task(generation, load)
        check_length(generation, load)
        check_budget(generation, load)
        return await self._grammars.checked(generation, tenant)

    async def _start_at_once(
        self, recording: Recording, key: CacheKey, generation: Generation, caller: Caller, sinks: Sequence[Sink]
    ) -> Membership:
        """Generate, and ask Redis meanwhile: an answer that is there sooner than the first delta takes its place."""
        prediction, window = await self.dispatch(generation, caller, recording.sinks)
        try:
            cached = await self._cache.get(key)
        except BaseException:
            window.cancel()
            raise
        if cached is None or len(cached) != len(sinks) or recording.has_begun:
            self._metrics.cache_misses += 1
            return self._new(prediction, window, generation.n)
        window.cancel()
        return self._repeated(cached, sinks, generation.n)

    def _new(self, prediction: Prediction, window: SequenceWindow, n: int) -> Membership:
        return Membership(window.cancel, partial(_delivered_of_flights, window.flights, n), prediction)

    def _repeated(self, cached: list[list[Delta]], sinks: Sequence[Sink], n: int) -> Membership:
        self._metrics.cache_hits += 1
        for sink, deltas in zip(sinks, cached, strict=True):
            for delta in deltas:
                sink.deliver(delta)
        return Membership(delivered=partial(_delivered, cached, n), is_repeated=True)

    async def dispatch(
        self, generation: Generation, caller: Caller, sinks: Sequence[Sink], requests: list[Request] | None = None
    ) -> tuple[Prediction, SequenceWindow]:
        """Admit and dispatch a generation whose answer is not repeated, as these requests, one per sequence.

        Raises:
            ApiError: As `start`.
        """
        dispatcher, shedder, timeout_s = self._dispatcher, self._shedder, generation.timeout_s or self._timeout_s
        model = generation.served_model
        load = dispatcher.fleet.load(model)
        if await shedder.recall(load, generation, caller):
            # More may wait by now.
            load = dispatcher.fleet.load(model)
        share = None if load is None else dispatcher.flights.share(load, caller.tenant)
        num_own = dispatcher.flights.num_of(model, caller.tenant)
        try:
            prediction = shedder.admit(load, generation, caller, share, num_own)
        except ApiError as error:
            if error.code == "waking":
                # Its client returns when the model is awake.
                dispatcher.wake_soon(model)
            raise
        expires_at = asyncio.get_running_loop().time() + timeout_s
        probe, hides = caller.probe, generation.sampling.logprobs is None
        # Another gateway that takes a stream over shows all that its requests ask for, so nothing is added to these.
        is_tapped = generation.pooling is None and not (hides and requests is not None)
        if probe is not None and probe.wants_logprobs and is_tapped:
            sinks = [LogprobTap(sink, probe, hides=hides) for sink in sinks]
            if hides:
                sampling = msgspec.structs.replace(generation.sampling, logprobs=0)
                generation = msgspec.structs.replace(generation, sampling=sampling)
        wire = self.requests(generation, caller) if requests is None else requests

        def submit(index: int, sink: Sink) -> Flight:
            prompt, choice = divmod(index, generation.n)
            # The choices of a prompt share its computation.
            tokens = 0 if choice else generation.prompts[prompt].estimated_tokens
            if load is not None:
                tokens = int(load.prompt_tokens(tokens))
            return dispatcher.submit(wire[index], sink, tokens, expires_at)

        window = SequenceWindow(submit, dispatcher.cancel, sinks, generation.num_at_once)
        window.begin()
        return prediction, window

    def _keep(self, key: CacheKey, model: str, sequences: list[list[Delta]]) -> None:
        load = self._dispatcher.fleet.reported_load(model)
        if load is None or load.revisions != key.revisions:
            # A worker of another revision may have begun or ended it: it is not an answer of those that the key names.
            return
        self._tasks.spawn(self._cache.put(key, sequences))


def _is_free(load: FleetLoad | None, generation: Generation) -> bool:
    """Whether the fleet is idle and the generation small, so that beginning it in vain costs no one anything."""
    if load is None or load.running or load.queued_requests or not load.num_workers:
        return False
    return generation.num_sequences == 1 and generation.estimated_prompt_tokens <= MAX_SPECULATIVE_TOKENS


def _delivered_of_flights(flights: Sequence[Flight], n: int) -> tuple[int, int]:
    return sum(f.prompt_tokens for f in flights[::n]), sum(len(f.emitted) for f in flights)


def _delivered(sequences: Sequence[Sequence[Delta]], n: int) -> tuple[int, int]:
    counts = [tokens_so_far(deltas) for deltas in sequences]
    return sum(prompt for prompt, _ in counts[::n]), sum(generated for _, generated in counts)
