"""The API key file: a JSON list of records, each with a key's SHA-256 in place of the key; beside it `tenants.json`.

`tenants.json` sets limits that all keys of a tenant share; a tenant that it does not list has no such limits. Both
are written by `headrace keys` and read by the gateways. A key itself is shown once, when it is made, and never stored.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gateway.admission.record_file import exclusive, read_records, write_records
from shared.bounds import Priority, Weight
from shared.errors import HeadraceError
from shared.subjects import encode_name

KEY_PREFIX = "hr-"
ALL_MODELS = "*"

# Redis counts in Lua, whose numbers are exact up to here.
MAX_LIMIT = 2**53
Limit = Annotated[int, Meta(ge=1)]
# Twenty a second: a client that waits for ten background responses asks for each every half second.
DEFAULT_READS_PER_MINUTE = 1200


class KeyNotFoundError(HeadraceError):
    """No key of this id or name is in the file, or several are."""

    def __init__(self, named: str, ids: tuple[str, ...] = ()) -> None:
        several = f"{len(ids)} keys are called {named!r}; name one by its id: {', '.join(ids)}"
        missing = f"there is no key {named!r}" if named else "name a key by its id or name"
        super().__init__(several if ids else f"{missing}; `headrace keys list` shows them")
        self.named = named
        self.ids = ids


class RevokedKeyError(HeadraceError):
    """A key is to be changed or rotated that is revoked."""

    def __init__(self, record: KeyRecord) -> None:
        super().__init__(f"{record.revocation()}; `headrace keys create` makes a new key")
        self.record = record


class KeyNameTakenError(HeadraceError):
    """A key is to have a name that means another key already."""

    def __init__(self, name: str, other: KeyRecord) -> None:
        super().__init__(f"the name {name!r} means {other.id} of tenant {other.tenant} already; choose another")
        self.name = name


class ReplacedKeyError(HeadraceError):
    """A key is to be rotated that was replaced: the new one would have no holder, and outlive the one in its place."""

    def __init__(self, old: KeyRecord, new: KeyRecord) -> None:
        called = f" ({new.name})" if new.name else ""
        super().__init__(f"{old.id} ({old.name}) was replaced by {new.id}{called}: rotate that one")


class KeyRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of one key. A limit of None means unlimited; a limit too large to count is clamped.

    Attributes:
        reads_per_minute: Limit on reads of stored data; each 64 kB, or 16 records of a list, count as one read.
        max_priority: Largest `priority` that its requests may ask for.
        weight: Weight of its requests in fair queueing, while others wait too.
        sha256: Hash of the whole key, in lower-case hexadecimal.
        models: Names it may use; `*` stands for all.
        created: Unix seconds; `expires` and `revoked` likewise, and from then on the key is invalid.
        replaces: Id of the key that it replaces, which is revoked with it.
    """

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    name: str = ""
    models: tuple[str, ...] = (ALL_MODELS,)
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None
    reads_per_minute: Limit = DEFAULT_READS_PER_MINUTE
    max_priority: Priority = 0
    weight: Weight = 1.0
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None
    replaces: str | None = None

    def __post_init__(self) -> None:
        bound_limits(self)

    def is_valid(self, now: float) -> bool:
        """Whether the key opens anything at `now`, in Unix seconds."""
        return self.revoked is None and (self.expires is None or self.expires > now)

    def revocation(self) -> str:
        """Say in words which key this is, and when it was revoked."""
        assert self.revoked is not None
        called = f" ({self.name})" if self.name else ""
        when = time.strftime("%Y-%m-%d at %H:%M UTC", time.gmtime(self.revoked))
        return f"{self.id}{called} of tenant {self.tenant} was revoked on {when}"


def bound_limits(record: Struct) -> None:
    """Make each limit of a record that is being made at most the largest that can be counted."""
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent", "reads_per_minute"):
        if (getattr(record, name, None) or 0) > MAX_LIMIT:
            msgspec.structs.force_setattr(record, name, MAX_LIMIT)


def hash_key(key: str) -> str:
    """Return the stored form of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def list_keys(path: Path) -> list[KeyRecord]:
    """Return the records of a key file, none without a file; `ConfigError` if it is not a readable key file."""
    return read_records(path, KeyRecord, "key")


def find_key(records: list[KeyRecord], named: str, *, with_revoked: bool = False) -> KeyRecord:
    """Return the one key with this id, or else this name; `KeyNotFoundError`, `RevokedKeyError` unless asked for."""
    return records[_find(records, named, with_revoked=with_revoked)]


def first_ids(records: Iterable[KeyRecord]) -> dict[str, str]:
    """Return for each key's id that of the first key in its place: its own, if it did not replace another."""
    firsts: dict[str, str] = {}
    # A key comes after the one that it replaces.
    for record in records:
        firsts[record.id] = firsts.get(record.replaces or "", record.replaces or record.id)
    return firsts


def create_key(path: Path, *, tenant: str, **fields: Any) -> tuple[KeyRecord, str]:
    """Add a key to the file and return its record and the key itself; `fields` that are None have their defaults.

    Raises as `list_keys`, `InvalidNameError` for a tenant, and `KeyNameTakenError` for a name that means another key.
    """
    encode_name(tenant)
    given = {name: value for name, value in fields.items() if value is not None}
    record, key = _with_new_key(KeyRecord(id="-", sha256="0" * 64, tenant=tenant, **given))
    with exclusive(path):
        records = list_keys(path)
        for other in records:
            if record.name and (other.id == record.name or (other.name == record.name and other.revoked is None)):
                raise KeyNameTakenError(record.name, other)
        write_records(path, [*records, record])
    return record, key


def update_key(path: Path, named: str, changes: Mapping[str, Any]) -> KeyRecord:
    """Change fields of a key, named by id or name, and return its record; raises as `find_key` and `list_keys`."""
    with exclusive(path):
        records = list_keys(path)
        index = _find(records, named)
        records[index] = msgspec.structs.replace(records[index], **changes)
        write_records(path, records)
        return records[index]


def rotate_key(path: Path, named: str, overlap_s: float) -> tuple[KeyRecord, str]:
    """Make a key that may do the same as another one, which expires after `overlap_s`, with as long a life.

    Raises as `find_key` and `list_keys`, and `ReplacedKeyError` if another key that is not revoked is in its place.
    """
    with exclusive(path):
        records = list_keys(path)
        index = _find(records, named)
        for record in records:
            if record.replaces == records[index].id and record.revoked is None:
                raise ReplacedKeyError(records[index], record)
        old, now = records[index], time.time()
        life_s = None if old.expires is None else old.expires - old.created
        expires = None if life_s is None else now + life_s
        record, key = _with_new_key(msgspec.structs.replace(old, expires=expires, replaces=old.id))
        ends = now + overlap_s if old.expires is None else min(old.expires, now + overlap_s)
        records[index] = msgspec.structs.replace(old, name=_rotated_name(records, old), expires=ends)
        write_records(path, [*records, record])
    return record, key


def revoke_key(path: Path, named: str) -> list[KeyRecord]:
    """Mark a key as revoked, named by id or name, and those that it replaced and that still open.

    Return its record, then the others'. A key revoked before stays as it is. Raises as `find_key` and `list_keys`.
    """
    with exclusive(path):
        records = list_keys(path)
        index = _find(records, named, with_revoked=True)
        now = time.time()
        found = [index, *(place for place in _replaced(records, index) if records[place].is_valid(now))]
        for place in found:
            if records[place].revoked is None:
                records[place] = msgspec.structs.replace(records[place], revoked=now)
        write_records(path, records)
        return [records[place] for place in found]


def _with_new_key(record: KeyRecord) -> tuple[KeyRecord, str]:
    key = KEY_PREFIX + secrets.token_urlsafe(36)
    new = {"id": f"key_{secrets.token_hex(6)}", "sha256": hash_key(key), "created": time.time()}
    return msgspec.structs.replace(record, **new), key


def _rotated_name(records: list[KeyRecord], old: KeyRecord) -> str:
    taken = {record.name for record in records}
    first = f"{old.name or old.id} (rotated)"
    numbered = (f"{first[:-1]} {number})" for number in itertools.count(2))
    return next(name for name in itertools.chain((first,), numbered) if name not in taken)


def _replaced(records: list[KeyRecord], index: int) -> list[int]:
    """Return the places of the keys in whose place a key was made, the latest first."""
    places = {record.id: place for place, record in enumerate(records)}
    found = [index]
    while (place := places.get(records[found[-1]].replaces or "")) is not None and place not in found:
        found.append(place)
    is_known = {record.replaces for record in records}
    key, name = records[index], f"{records[index].name} (rotated)"
    found += [
        place
        for place, old in enumerate(records)
        if key.name and (old.name, old.tenant) == (name, key.tenant) and old.created < key.created
        # Replaced before it was written down by what; a rotated key always ends.
        if old.id not in is_known and old.expires is not None and place not in found
    ]
    return found[1:]


def _find(records: list[KeyRecord], named: str, *, with_revoked: bool = False) -> int:
    """Return the place of the one key that has this id, or else this name; a revoked one only if asked, and last."""
    valid = [index for index, record in enumerate(records) if record.revoked is None]
    revoked = [index for index in range(len(records)) if index not in valid]
    found = [index for index in (*valid, *revoked) if records[index].id == named]
    for places in (valid, revoked):
        found = found or [index for index in places if named and records[index].name == named]
    if found and not with_revoked and found[0] in revoked:
        raise RevokedKeyError(max((records[index] for index in found), key=lambda record: record.revoked or 0.0))
    if len(found) != 1:
        raise KeyNotFoundError(named, tuple(records[index].id for index in found))
    return found[0]


class TenantRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one tenant; None does not limit, and one larger than can be counted is the largest that can."""

    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None

    def __post_init__(self) -> None:
        bound_limits(self)


def tenants_file(keys_file: Path) -> Path:
    """Return where the limits of the tenants are whose keys are in `keys_file`."""
    return keys_file.with_name("tenants.json")


def list_tenants(keys_file: Path) -> list[TenantRecord]:
    """Return the limits of all tenants that have any; `ConfigError` for an unreadable file."""
    return read_records(tenants_file(keys_file), TenantRecord, "tenant")


def limit_tenant(keys_file: Path, tenant: str, limits: dict[str, Any]) -> TenantRecord:
    """Replace a tenant's limits, or remove them if all are None; `ConfigError`, or `InvalidNameError` for its name."""
    encode_name(tenant)
    path, record = tenants_file(keys_file), TenantRecord(tenant=tenant, **limits)
    with exclusive(path):
        others = [each for each in list_tenants(keys_file) if each.tenant != tenant]
        write_records(path, [*others, record] if any(limits.values()) else others)
    return record
