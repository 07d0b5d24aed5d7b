"""A JSON list of records in a file that one command writes at a time, atomically, and gateways read: keys, tenants.

Errors name `HEADRACE_KEYS_FILE`: files of tenants lie beside the key file.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from shared.errors import ConfigError
from shared.field_problem import field_problem
from shared.files import AtomicFile

R = TypeVar("R", bound=Struct)
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)$")


def read_records(path: Path, kind: type[R], what: str) -> list[R]:
    """Return a file's records, none without a file; errors call a record `what`. `ConfigError` for a bad file."""
    named = path if what == "key" else f"the {what}s beside the key file: {path}"
    try:
        # Editors of Windows put the mark of UTF-8 first.
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError("HEADRACE_KEYS_FILE", f"{named} cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(content, type=list[kind])  # type: ignore[valid-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("HEADRACE_KEYS_FILE", f"{named}{_problem(content, error, kind, what)}") from None


def _problem(content: bytes, error: Exception, kind: type[Struct], what: str) -> str:
    if not content.strip():
        # Not the same as no keys: it may be on its way here.
        return f" is empty; a file without {what}s holds []"
    try:
        # msgspec's own error of this kind has the position within one string, not within the file.
        content.decode()
    except UnicodeDecodeError as not_text:
        byte = content[not_text.start]
        return f", line {_line(content, not_text.start)}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8"
    try:
        records = msgspec.json.decode(content, type=list[msgspec.Raw])
        for number, record in enumerate(records, 1):
            if (problem := _record_problem(record, kind, what)) is not None:
                return f", {what} {number}{problem}"
    except msgspec.ValidationError as not_a_list:
        return f": {field_problem(not_a_list).sentence(f'the list of {what}s')}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as not_json:
        text = str(not_json)
        position = _BYTE_POSITION.search(text)
        line = _line(content, int(position[1]) if position else len(content))
        return f", line {line}: not JSON: {_BYTE_POSITION.sub('', text).strip()}"
    return f": {error}"


def _line(content: bytes, position: int) -> int:
    return content.count(b"\n", 0, position) + 1


def _record_problem(record: msgspec.Raw, kind: type[Struct], what: str) -> str | None:
    try:
        msgspec.json.decode(record, type=kind)
    except msgspec.ValidationError as error:
        fields = msgspec.json.decode(record)
        named = fields.get("id") if isinstance(fields, dict) else None
        name = f" ({named[:64]})" if isinstance(named, str) else ""
        return f"{name}: {field_problem(error).sentence(f'the {what}')}"
    return None


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lock a file, whose folder is made, against other writers during the block; `ConfigError` if unwritable."""
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


def write_records(path: Path, records: Sequence[Struct]) -> None:
    """Replace a file's records: readers see the old ones or the new ones. `ConfigError` if it cannot be written."""
    content = msgspec.json.format(msgspec.json.encode(records), indent=2) + b"\n"
    try:
        file = AtomicFile(path)
        try:
            file.write(content)
            file.commit()
        finally:
            file.abort()
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError("HEADRACE_KEYS_FILE", f"{path} cannot be written: {error.strerror}")
