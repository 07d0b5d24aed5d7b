"""Files as objects of OpenAI's API, and the record stored beside the bytes of each."""

from __future__ import annotations

import re
import secrets
import time
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api.operation import Operation

Purpose = Literal["batch", "batch_output", "vision", "user_data"]
UPLOADED = ("batch", "vision", "user_data")
"""Purposes of uploads: lines of a batch, or an image."""
FileStatus = Literal["uploaded", "processed"]

BYTES = "application/octet-stream"
FILE_ID = re.compile(r"file-[0-9a-f]{32}(-output|-error)?")


class FileRecord(Struct, frozen=True, kw_only=True):
    """Record of a file, stored as JSON beside the bytes. It is written after them; the file exists once it is there.

    Attributes:
        sha256: Of the bytes, in hexadecimal digits.
        mime_type: As the uploading client declared it; None if it did not.
        expires_at: Unix seconds; None for a file that stays.
    """

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    num_bytes: int
    sha256: str
    created_at: int
    expires_at: int | None = None
    status: FileStatus = "processed"
    mime_type: str | None = None


class FileAnswer(Struct, forbid_unknown_fields=True):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: FileStatus
    expires_at: int | UnsetType = UNSET


class FileList(Struct, forbid_unknown_fields=True):
    """A page of files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, forbid_unknown_fields=True):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: bool


OPERATIONS = (
    Operation(
        "post",
        "/v1/files",
        "Upload a file, as multipart/form-data: `file`, and `purpose` (`batch`; `vision` or `user_data` for an image). "
        "Here and below, requests with the header `anthropic-version` need no purpose and get Anthropic's objects.",
        FileAnswer,
    ),
    Operation("get", "/v1/files", "List files.", FileList),
    Operation("get", "/v1/files/{file_id}", "Show a file.", FileAnswer),
    Operation("delete", "/v1/files/{file_id}", "Delete a file.", DeletedFile),
    Operation("get", "/v1/files/{file_id}/content", "Download a file.", bytes, media_type=BYTES),
)


def ordered_hex(now: float | None = None) -> str:
    """Return 32 unguessable hexadecimal digits that sort by time."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{milliseconds & (1 << 48) - 1:012x}{secrets.token_hex(10)}"


def file_answer(record: FileRecord) -> FileAnswer:
    """Return a file as clients see it."""
    return FileAnswer(
        id=record.id,
        object="file",
        bytes=record.num_bytes,
        created_at=record.created_at,
        filename=record.filename,
        purpose=record.purpose,
        status=record.status,
        expires_at=UNSET if record.expires_at is None else record.expires_at,
    )


def checked_filename(name: str) -> str:
    """Return what a client calls a file, without a path and control characters; it names nothing on the disk."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in last if character.isprintable())[:255] or "upload"
