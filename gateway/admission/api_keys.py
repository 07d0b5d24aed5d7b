"""The API key file: a JSON list of records, each with a key's SHA-256 in place of the key.

Written by `headrace keys`, one writer at a time and atomically; read by the gateways. A key itself is shown once, when
it is created, and stored nowhere.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.bounds import Priority
from shared.errors import ConfigError, HeadraceError
from shared.field_problem import field_problem
from shared.subjects import encode_name

KEY_PREFIX = "hr-"
ALL_MODELS = "*"

Limit = Annotated[int, Meta(ge=1)]
# Twenty a second: a client that waits for ten background responses asks for each every half second.
DEFAULT_READS_PER_MINUTE = 1200


class KeyNotFoundError(HeadraceError):
    """No key of this id is in the file."""

    def __init__(self, key_id: str) -> None:
        """Say which id."""
        super().__init__(f"there is no key {key_id!r}; `headrace keys list` shows them")
        self.key_id = key_id


class KeyRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one key. A limit of None does not limit.

    Attributes:
        reads_per_minute: Reads of stored responses, one for each 64 kB.
        max_priority: Largest `priority` that its requests may ask for.
        sha256: Of the whole key, in lower-case hexadecimal.
        models: Names it may use; `*` stands for all.
        created: Unix seconds; `revoked` likewise, and a revoked key opens nothing.
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
    created: float = 0.0
    revoked: float | None = None


_decoder = msgspec.json.Decoder(list[KeyRecord])
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)$")


def hash_key(key: str) -> str:
    """Return what is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def list_keys(path: Path) -> list[KeyRecord]:
    """Return the records of a key file, none when there is no file.

    Raises:
        ConfigError: The file cannot be read or is not a key file.
    """
    try:
        # Editors of Windows put the mark of UTF-8 first.
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError("HEADRACE_KEYS_FILE", f"{path} cannot be read: {error.strerror}") from error
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("HEADRACE_KEYS_FILE", f"{path}{_problem(content, error)}") from None


def _problem(content: bytes, error: Exception) -> str:
    """Say where a file is wrong, by line or by key, and how."""
    if not content.strip():
        # Not the same as no keys: it may be on its way here.
        return " is empty; a file without keys holds []"
    try:
        # msgspec's own error of this kind has the position within one string, not within the file.
        content.decode()
    except UnicodeDecodeError as not_text:
        byte = content[not_text.start]
        return f", line {_line(content, not_text.start)}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8"
    try:
        records = msgspec.json.decode(content, type=list[msgspec.Raw])
        for number, record in enumerate(records, 1):
            if (problem := _record_problem(record)) is not None:
                return f", key {number}{problem}"
    except msgspec.ValidationError as not_a_list:
        return f": {field_problem(not_a_list).sentence('the list of keys')}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as not_json:
        text = str(not_json)
        position = _BYTE_POSITION.search(text)
        line = _line(content, int(position[1]) if position else len(content))
        return f", line {line}: not JSON: {_BYTE_POSITION.sub('', text).strip()}"
    return f": {error}"


def _line(content: bytes, position: int) -> int:
    return content.count(b"\n", 0, position) + 1


def _record_problem(record: msgspec.Raw) -> str | None:
    try:
        msgspec.json.decode(record, type=KeyRecord)
    except msgspec.ValidationError as error:
        fields = msgspec.json.decode(record)
        named = fields.get("id") if isinstance(fields, dict) else None
        name = f" ({named[:64]})" if isinstance(named, str) else ""
        return f"{name}: {field_problem(error).sentence('the key')}"
    return None


def create_key(
    path: Path,
    *,
    tenant: str,
    name: str = "",
    models: tuple[str, ...] = (ALL_MODELS,),
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_concurrent: int | None = None,
    reads_per_minute: int | None = None,
    max_priority: int = 0,
) -> tuple[KeyRecord, str]:
    """Add a key to the file and return its record and the key itself.

    Raises:
        ConfigError: The file cannot be read or is not a key file.
        InvalidNameError: The tenant cannot be used as a name.
    """
    encode_name(tenant)
    key = KEY_PREFIX + secrets.token_urlsafe(36)
    record = KeyRecord(
        id=f"key_{secrets.token_hex(6)}",
        sha256=hash_key(key),
        tenant=tenant,
        name=name,
        models=models,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        reads_per_minute=reads_per_minute or DEFAULT_READS_PER_MINUTE,
        max_priority=max_priority,
        created=time.time(),
    )
    with _exclusive(path):
        _write(path, [*list_keys(path), record])
    return record, key


def revoke_key(path: Path, key_id: str) -> KeyRecord:
    """Mark a key as revoked and return its record; a key revoked before stays as it is.

    Raises:
        ConfigError: The file cannot be read or is not a key file.
        KeyNotFoundError: There is no such key.
    """
    with _exclusive(path):
        records = list_keys(path)
        for index, record in enumerate(records):
            if record.id == key_id:
                if record.revoked is None:
                    record = msgspec.structs.replace(record, revoked=time.time())
                    records[index] = record
                    _write(path, records)
                return record
    raise KeyNotFoundError(key_id)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, records: list[KeyRecord]) -> None:
    content = msgspec.json.format(msgspec.json.encode(records), indent=2) + b"\n"
    # mkstemp makes the file readable by its owner alone; the rename shows readers either the old list or the new one.
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError("HEADRACE_KEYS_FILE", f"{path} cannot be written: {error.strerror}")
