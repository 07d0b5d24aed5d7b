"""Requests whose answers came from the cache, by their bytes: who sends one again is answered without its being read.

How a body is read, what its model's chat format makes of it, and the key of its answer follow from its bytes and from
what the workers say of the model; while both are as before, so is all of that. Only requests are kept that were
answered from the cache, since of others hardly any comes again. Tenants share nothing here: an answer that comes sooner
would tell one what another has asked.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from gateway.cache.prompt_cache import CacheKey, PromptCache
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from shared.messages import Delta

# A longer body takes so long to hash and to read that what is saved here is not missed.
MAX_BODY_BYTES = 16 << 10
MAX_TOTAL_BYTES = 2 << 20
# What an entry takes beside two copies of its text: the body, and what was read of it.
ENTRY_BYTES = 2000

Traits = tuple[object, ...]
Name = tuple[str, str, bytes]


class RepeatedAnswer(Struct, frozen=True):
    """A request that is known, and its answer.

    Attributes:
        generation: As it was read, with its model's defaults and chat format.
        sequences: The deltas of each sequence.
    """

    generation: Generation
    sequences: list[list[Delta]]


class _Entry(Struct, frozen=True):
    generation: Generation
    key: CacheKey
    traits: Traits


class RepeatedRequests:
    """The requests that were answered from the cache lately: bounded in bytes, least recently used out first."""

    def __init__(self, fleet: Fleet, cache: PromptCache) -> None:
        """Know none. Answers stay in `cache`, and only there."""
        self._fleet = fleet
        self._cache = cache
        self._entries: OrderedDict[Name, _Entry] = OrderedDict()
        self._num_bytes = 0

    def find(self, endpoint: str, tenant: str, body: bytes) -> RepeatedAnswer | None:
        """Return the answer to a body that an endpoint gets, if this process has it and nothing has changed since."""
        name = (endpoint, tenant, body)
        entry = self._entries.get(name) if self._entries else None
        if entry is None:
            return None
        sequences = None
        if self.traits(entry.generation.model) == entry.traits:
            sequences = self._cache.remembered(entry.key)
        if sequences is None:
            self._drop(name)
            return None
        self._entries.move_to_end(name)
        return RepeatedAnswer(entry.generation, sequences)

    def traits(self, model: str) -> Traits | None:
        """Return what the workers say of a model by which requests are read or refused; None for an unknown one."""
        load = self._fleet.reported_load(model)
        return None if load is None else _traits(load)

    def keep(
        self, endpoint: str, tenant: str, body: bytes, generation: Generation, key: CacheKey, traits: Traits
    ) -> None:
        """Remember a request that was answered from the cache.

        Args:
            endpoint: Which has read it.
            tenant: Whose it is.
            body: Its bytes.
            generation: What was read.
            key: Of its answer.
            traits: Of its model, from before it was read.
        """
        name = (endpoint, tenant, body)
        if len(body) > MAX_BODY_BYTES or name in self._entries:
            return
        self._entries[name] = _Entry(generation, key, traits)
        self._num_bytes += _size(body)
        while self._num_bytes > MAX_TOTAL_BYTES:
            self._drop(next(iter(self._entries)))

    def _drop(self, name: Name) -> None:
        del self._entries[name]
        self._num_bytes -= _size(name[2])


def _size(body: bytes) -> int:
    return 2 * len(body) + ENTRY_BYTES


def _traits(load: FleetLoad) -> Traits:
    return (
        load.revisions,
        load.chat_format,
        load.sampling_defaults,
        load.tasks,
        load.longest_model_len,
        load.max_prompt_characters,
        load.num_workers > 0,
    )
