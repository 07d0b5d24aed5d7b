"""The adapters beside a model: what is in which slot, and what names mean. It needs no torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.adapters.config import AdapterError
from shared.adapter_calls import MAX_ADAPTERS
from shared.errors import BadRequestError, ConfigError

VARIABLE = "HEADRACE_LORA_MODULES"
_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter beside the model; `digest` is the SHA-256 of its content, `slot` that of `AdapterTargets`."""

    name: str
    digest: str
    slot: int


class LoadedAdapters:
    """The adapters beside a model: what is in which slot, and what names mean. One thread changes it.

    A name may mean several contents, the newest last. What has no name stays for requests that name its digest, until
    its slot is needed.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self._num_slots = num_slots
        self._slots: dict[str, int] = {}
        self._listed: list[LoadedAdapter] = []

    @property
    def all(self) -> tuple[LoadedAdapter, ...]:
        """What names mean."""
        return tuple(self._listed)

    def has(self, name: str) -> bool:
        """Whether a name means anything."""
        return any(each.name == name for each in self._listed)

    def is_resident(self, digest: str) -> bool:
        """Whether there is an adapter of this content."""
        return digest in self._slots

    def find(self, asked: str | None) -> LoadedAdapter | None:
        """Return the adapter of a name or a digest, None without either; `BadRequestError` if it is not loaded."""
        if asked is None:
            return None
        if asked in self._slots:
            return LoadedAdapter("", asked, self._slots[asked])
        found = next((each for each in reversed(self._listed) if each.name == asked), None)
        if found is None:
            known = ", ".join(sorted({each.name for each in self._listed})[:10]) or "none"
            raise BadRequestError(f"adapter: this worker has no adapter {asked[:64]!r}; it has: {known}.", "adapter")
        return found

    def take_slot(self, used: Collection[int | None] = ()) -> int | None:
        """Return a slot that nothing is in, or whose adapter has no name and is not used; that one is gone then."""
        free = set(range(self._num_slots)).difference(self._slots.values())
        if free:
            return min(free)
        named = {each.digest for each in self._listed}
        for digest, slot in self._slots.items():
            if digest not in named and slot not in used:
                del self._slots[digest]
                return slot
        return None

    def add(self, digest: str, slot: int) -> None:
        """Note what is in a slot."""
        self._slots[digest] = slot

    def put(self, name: str, digest: str) -> None:
        """Make this the newest content of a name; `AdapterError` if there are too many names."""
        others = [each for each in self._listed if (each.name, each.digest) != (name, digest)]
        if len(others) >= MAX_ADAPTERS:
            raise AdapterError(f"there are {MAX_ADAPTERS} names of adapters already; unload one")
        self._listed = [*others, LoadedAdapter(name, digest, self._slots[digest])]

    def unlist(self, name: str) -> None:
        """Let a name mean nothing."""
        self._listed = [each for each in self._listed if each.name != name]

    def unlist_older(self, name: str, digest: str) -> None:
        """Let a name mean nothing that it meant before it got this content, unless that was unlisted meanwhile."""
        places = [place for place, each in enumerate(self._listed) if (each.name, each.digest) == (name, digest)]
        if places:
            self._listed = [each for place, each in enumerate(self._listed) if each.name != name or place >= places[0]]


def parse_modules(text: str) -> dict[str, Path]:
    """Read `name=directory`, several by commas or white space; `ConfigError` if malformed or a name is repeated."""
    modules: dict[str, Path] = {}
    for item in re.split(r"[,\s]+", text.strip(", \t\n")):
        name, separator, directory = item.partition("=")
        if not (name and separator and directory):
            raise ConfigError(VARIABLE, f"has {item[:80]!r}; each adapter is name=directory")
        try:
            check_name(name)
        except AdapterError as error:
            raise ConfigError(VARIABLE, str(error)) from None
        if name in modules:
            raise ConfigError(VARIABLE, f"has {name!r} twice")
        modules[name] = Path(directory)
    if len(modules) > MAX_ADAPTERS:
        raise ConfigError(VARIABLE, f"has {len(modules)} adapters; at most {MAX_ADAPTERS} are served")
    return modules


def is_digest(text: str) -> bool:
    """Whether this is the digest of an adapter's content."""
    return _DIGEST.fullmatch(text) is not None


def check_name(name: str) -> None:
    """Refuse names that are too long or read as a digest does, with `AdapterError`."""
    if not 1 <= len(name) <= _MAX_NAME or is_digest(name):
        problem = f"has 1 to {_MAX_NAME} characters and is no digest"
        raise AdapterError(f"an adapter cannot have the name {name[:80]!r}; one {problem}")
