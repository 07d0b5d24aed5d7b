"""Requests whose answers came from the cache, by their bytes: who sends one again is answered without its being read.

How a body is read, what its model's chat format makes of it, and the key of its answer follow from its bytes and from
what the workers say of the model; while both are as before, so is all of that. Only requests are kept that were
answered from the cache, since of others hardly any comes again. Tenants share nothing here: an answer that comes sooner
would tell one what another has asked.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

from gateway.cache.prompt_cache import CacheKey, PromptCache
from gateway.cache.recording import content_and_end
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from shared.messages import Delta, encode

# A longer body takes so long to hash and to read that what is saved here is not missed.
MAX_BODY_BYTES = 16 << 10
MAX_TOTAL_BYTES = 2 << 20
# What an entry takes beside two copies of its text: the body, and what was read of it.
ENTRY_BYTES = 2000

# Bytes in memory for one on the wire: of a token id 36 for five, of a log probability more.
_DECODED = 8

Traits = tuple[object, ...]
Name = tuple[str, str, bytes]


class RepeatedAnswer(Struct, frozen=True):
    """A request that is known, and its answer.

    Attributes:
        generation: As it was read, with its model's defaults and chat format.
        sequences: The deltas of each sequence: its content, and its end.
        traits: Of its model, with which both hold.
        expires_at: Unix time until which its answer may be repeated.
        num_bytes: What it counts against the bound.
    """

    generation: Generation
    sequences: list[list[Delta]]
    traits: Traits
    expires_at: float
    num_bytes: int


class RepeatedRequests:
    """The requests that were answered from the cache lately: bounded in bytes, least recently used out first."""

    def __init__(self, fleet: Fleet, cache: PromptCache, clock: Callable[[], float] = time.time) -> None:
        """Know none. Answers are those of `cache`, and no longer kept than there; `clock` is in Unix seconds."""
        self._fleet = fleet
        self._cache = cache
        self._clock = clock
        self._answers: OrderedDict[Name, RepeatedAnswer] = OrderedDict()
        self._num_bytes = 0

    def find(self, endpoint: str, tenant: str, body: bytes) -> RepeatedAnswer | None:
        """Return the answer to a body that an endpoint gets, if this process has it and nothing has changed since."""
        name = (endpoint, tenant, body)
        answer = self._answers.get(name) if self._answers else None
        if answer is None:
            return None
        load = self._fleet.reported_load(answer.generation.model)
        if answer.expires_at <= self._clock() or load is None or answer.traits != _traits(load):
            self._drop(name)
            return None
        self._answers.move_to_end(name)
        return answer

    def keep(
        self, endpoint: str, tenant: str, body: bytes, generation: Generation, key: CacheKey, load: FleetLoad
    ) -> None:
        """Remember a request that was answered from the cache.

        Args:
            endpoint: Which has read it.
            tenant: Whose it is.
            body: Its bytes.
            generation: What was read.
            key: Of its answer.
            load: What the workers said of its model, from before it was read.
        """
        name = (endpoint, tenant, body)
        sequences = None if len(body) > MAX_BODY_BYTES or name in self._answers else self._cache.remembered(key)
        if sequences is None:
            return
        sequences = [content_and_end(deltas) for deltas in sequences]
        num_bytes = ENTRY_BYTES + 2 * len(body) + sum(_size(content) for content, _ in sequences)
        answer = RepeatedAnswer(generation, sequences, _traits(load), self._cache.expires_at(key), num_bytes)
        self._answers[name] = answer
        self._num_bytes += num_bytes
        while self._num_bytes > MAX_TOTAL_BYTES:
            self._drop(next(iter(self._answers)))

    def _drop(self, name: Name) -> None:
        self._num_bytes -= self._answers.pop(name).num_bytes


def _size(delta: Delta) -> int:
    """Return about how many bytes a delta takes in memory: what it is made of is several times as long as encoded."""
    return _DECODED * len(encode(delta))


def _traits(load: FleetLoad) -> Traits:
    """Return what the workers say of a model by which requests are read or refused."""
    return (
        load.revisions,
        load.chat_format,
        load.sampling_defaults,
        load.tasks,
        load.longest_model_len,
        load.max_prompt_characters,
        load.num_workers > 0,
    )
