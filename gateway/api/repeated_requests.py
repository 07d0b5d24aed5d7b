"""Requests whose answers came from the cache, by their bytes: who sends one again is answered without its being read.

How a body is read, what its model's chat format makes of it, and the key of its answer follow from its bytes and from
what the workers say of the model; while both are as before, so is all of that. Only requests are kept that were
answered from the cache, since of others hardly any comes again. Their answers are the cache's own. Tenants share
nothing here: an answer that comes sooner would tell one what another has asked.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from gateway.cache.prompt_cache import CacheKey, PromptCache, Sequences
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation

# Reading a longer body takes so long that this saves too little.
MAX_BODY_BYTES = 16 << 10
MAX_TOTAL_BYTES = 2 << 20
# Bytes of an entry beside two copies of its body's text.
ENTRY_BYTES = 2000

Traits = tuple[object, ...]
Name = tuple[str, str, bytes]


class RepeatedAnswer(Struct, frozen=True):
    """A request that is known, and its answer."""

    generation: Generation
    sequences: Sequences


class _Known(Struct, frozen=True):
    """A request as it was read, the key of its answer, and the traits of its model for which both hold."""

    generation: Generation
    key: CacheKey
    traits: Traits


class RepeatedRequests:
    """The requests that were answered from the cache lately: bounded in bytes, least recently used out first."""

    def __init__(self, fleet: Fleet, cache: PromptCache) -> None:
        self._fleet = fleet
        self._cache = cache
        self._known: OrderedDict[Name, _Known] = OrderedDict()
        self._num_bytes = 0

    def find(self, endpoint: str, tenant: str, body: bytes) -> RepeatedAnswer | None:
        """Return the answer to a body that an endpoint gets, if this process has it and nothing has changed since."""
        name = (endpoint, tenant, body)
        known = self._known.get(name) if self._known else None
        if known is None:
            return None
        load = self._fleet.reported_load(known.generation.model)
        is_same = load is not None and known.traits == _traits(load)
        sequences = self._cache.told(known.key) if is_same else None
        if sequences is None:
            self._drop(name)
            return None
        self._known.move_to_end(name)
        return RepeatedAnswer(known.generation, sequences)

    def keep(
        self, endpoint: str, tenant: str, body: bytes, generation: Generation, key: CacheKey, load: FleetLoad
    ) -> None:
        """Remember a request that was answered from the cache, with the load of its model from before it was read."""
        name = (endpoint, tenant, body)
        if len(body) > MAX_BODY_BYTES or name in self._known or self._cache.told(key) is None:
            return
        self._known[name] = _Known(generation, key, _traits(load))
        self._num_bytes += _size(name)
        while self._num_bytes > MAX_TOTAL_BYTES:
            self._drop(next(iter(self._known)))

    def _drop(self, name: Name) -> None:
        del self._known[name]
        self._num_bytes -= _size(name)


def _size(name: Name) -> int:
    return ENTRY_BYTES + 2 * len(name[2])


def _traits(load: FleetLoad) -> Traits:
    """Return the traits of a model by which requests are read or refused, as its workers report them."""
    return (
        load.revisions,
        load.chat_format,
        load.sampling_defaults,
        load.tasks,
        load.longest_model_len,
        load.max_prompt_characters,
        load.num_workers > 0,
    )
