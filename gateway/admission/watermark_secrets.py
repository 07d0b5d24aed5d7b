"""The secrets that mark answers, of tenants and of single API keys, in `watermarks.json` beside the key file.

Written by `headrace keys watermark`, read by gateways, which send workers keys that are derived from them for one model
(`shared.watermark`). A file of its own, so that commands of earlier versions, which rewrite limits, leave it alone.
Secrets that were rotated out stay in it, to detect earlier texts. A `ConfigError` says that it, or the key file, cannot
be read or written.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from gateway.admission.api_keys import KeyRecord, find_key, first_ids, list_keys
from gateway.admission.record_file import exclusive, read_records, write_records
from shared.errors import HeadraceError
from shared.subjects import encode_name
from shared.watermark import WatermarkKey, derived_key

_SECRET_BYTES = 32


class NoWatermarkError(HeadraceError):
    """A secret is to be rotated or used for detection, and there is none."""


class Marked(NamedTuple):
    """Whose answers a secret marks: a tenant's, or those to one of its API keys, which `key` names by id.

    A key that was rotated goes by the id of the first one in its place.
    """

    tenant: str
    key: str = ""

    def __str__(self) -> str:
        return f"key {self.key} of tenant {self.tenant}" if self.key else f"tenant {self.tenant}"


class WatermarkRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A secret, in hexadecimal. It is never shown: not in logs, nor in what `repr` says.

    Attributes:
        key: As in `Marked`.
        made: Unix seconds; None where it was not written down. `rotated` likewise, None while the secret is in use.
    """

    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    secret: WatermarkKey
    key: Annotated[str, Meta(max_length=64)] = ""
    made: float | None = None
    rotated: float | None = None

    @property
    def marked(self) -> Marked:
        """Whose answers it marks."""
        return Marked(self.tenant, self.key)

    def __str__(self) -> str:
        since = "" if self.made is None else f", since {_minute(self.made)}"
        until = "" if self.rotated is None else f", until {_minute(self.rotated)}"
        return " ".join(f"{self.marked}{since}{until}".split())

    __repr__ = __str__


def _minute(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(seconds))


def watermarks_file(keys_file: Path) -> Path:
    """Return where the secrets are that belong to the keys in `keys_file` and their tenants."""
    return keys_file.with_name("watermarks.json")


def list_watermarks(keys_file: Path) -> list[WatermarkRecord]:
    """Return all secrets, each owner's in the order in which they were made; `ConfigError` for a bad file."""
    return read_records(watermarks_file(keys_file), WatermarkRecord, "watermark")


def secrets_in_use(records: list[WatermarkRecord], keys: list[KeyRecord]) -> dict[Marked, str]:
    """Return the secrets of tenants, and of each key that has one of its own, by its id."""
    in_use = {record.marked: record.secret for record in records if record.rotated is None}
    firsts = first_ids(keys)
    of_keys = {Marked(key.tenant, key.id): in_use.get(Marked(key.tenant, firsts[key.id])) for key in keys}
    return in_use | {owner: secret for owner, secret in of_keys.items() if secret is not None}


def marked_key(keys_file: Path, named: str, *, with_revoked: bool) -> Marked:
    """Return the owner of the secret of a key, named by id or name; raises as `list_keys` and `find_key`."""
    keys = list_keys(keys_file)
    key = find_key(keys, named, with_revoked=with_revoked)
    return Marked(key.tenant, first_ids(keys)[key.id])


def detection_keys(keys_file: Path, owner: Marked, model: str) -> list[str]:
    """Return lines for `headrace detect`, each a model's key and its owner; `NoWatermarkError` if none."""
    records = [each for each in list_watermarks(keys_file) if owner in (each.marked, Marked(each.tenant))]
    if not records:
        raise NoWatermarkError(f"{owner} has no secret; the same command without --model makes one")
    return [f"{derived_key(record.secret, model)} {record}" for record in records]


def make_watermark(keys_file: Path, owner: Marked) -> bool:
    """Mark answers from now on; return whether they were not marked before. `InvalidNameError` for a bad tenant."""
    encode_name(owner.tenant)
    path = watermarks_file(keys_file)
    with exclusive(path):
        known = list_watermarks(keys_file)
        if any(record.marked == owner and record.rotated is None for record in known):
            return False
        write_records(path, [*known, _new_record(owner)])
    return True


def rotate_watermark(keys_file: Path, owner: Marked) -> None:
    """Mark answers by a new secret; the earlier one stays, dated, for detection. `NoWatermarkError` without one."""
    path = watermarks_file(keys_file)
    with exclusive(path):
        known = list_watermarks(keys_file)
        if all(record.marked != owner or record.rotated is not None for record in known):
            raise NoWatermarkError(f"{owner} has no secret to rotate; the same command without --rotate makes one")
        new = _new_record(owner)
        for place, record in enumerate(known):
            if record.marked == owner and record.rotated is None:
                known[place] = msgspec.structs.replace(record, rotated=new.made)
        write_records(path, [*known, new])


def remove_watermark(keys_file: Path, owner: Marked) -> bool:
    """Forget all secrets of an owner, whose texts can then no longer be detected; return whether it had one."""
    path = watermarks_file(keys_file)
    with exclusive(path):
        known = list_watermarks(keys_file)
        others = [record for record in known if record.marked != owner]
        if len(others) < len(known):
            write_records(path, others)
    return len(others) < len(known)


def told_after_removal(keys_file: Path, owner: Marked, had_one: bool) -> str:
    """Say in words which answers are marked still."""
    in_use = [record.marked for record in list_watermarks(keys_file) if record.rotated is None]
    if owner.key and Marked(owner.tenant) in in_use:
        return "answers are marked by the secret of its tenant"
    own = [other.key for other in in_use if other.tenant == owner.tenant and other.key and not owner.key]
    state = "answers are" if had_one else "answers were and are"
    return f"{state} not marked" + (f", but for keys with a secret of their own: {', '.join(own)}" if own else "")


def _new_record(owner: Marked) -> WatermarkRecord:
    secret = secrets.token_hex(_SECRET_BYTES)
    return WatermarkRecord(tenant=owner.tenant, key=owner.key, secret=secret, made=time.time())
