"""`POST /v1/files`: the fields of a form in any order, the file's bytes straight into the store, in constant memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

from gateway.api.schemas.checks import invalid_value, missing_parameter, unknown_parameter
from gateway.errors import ApiError
from gateway.files.form_data import MAX_FIELD_BYTES, FieldStart, FormData
from gateway.files.objects import UPLOADED, FileRecord, Purpose, checked_filename

# As at OpenAI, where files of batches are deleted after 30 days if nothing else is said.
DEFAULT_EXPIRY_S = 30 * 86_400
_EXPIRY_S = (3600, DEFAULT_EXPIRY_S)
# Pieces of the store: a write to the disk or to a bucket is not made for each packet.
_PIECE_BYTES = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK": "zip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_FIELDS = frozenset({"purpose", "file", "expires_after[anchor]", "expires_after[seconds]"})
_ANTHROPIC_FIELDS = frozenset({"file", "expires_in_seconds"})
# What Anthropic's libraries upload is for requests; batches of theirs are not files.
_ANTHROPIC_PURPOSE: Purpose = "user_data"
_SECONDS = re.compile(r"[0-9]{1,9}")


@dataclass(slots=True)
class UploadForm:
    """A form that is being read.

    Attributes:
        texts: The fields beside the file, complete once `pieces` has ended.
        filename: What the client calls the file; None before it has begun.
        mime_type: And of what type it says that it is.
        is_from_anthropic: Its fields are those of Anthropic's API.
    """

    form: FormData
    allow_unknown: bool = False
    is_from_anthropic: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    mime_type: str | None = None
    num_bytes: int = 0

    async def pieces(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the bytes of the file, and read the other fields; `ApiError` 400 for an incomplete form."""
        name, text, held = "", bytearray(), bytearray()
        async for data in body:
            for event in self.form.feed(data):
                if isinstance(event, FieldStart):
                    self._take_text(name, text)
                    name, text = self._begin(event), bytearray()
                elif name != "file":
                    text += event
                    if len(text) > MAX_FIELD_BYTES:
                        raise invalid_value(name, f"'{name[:64]}' is longer than {MAX_FIELD_BYTES} bytes.")
                else:
                    held += event
                    self.num_bytes += len(event)
                    if len(held) >= _PIECE_BYTES:
                        _check_beginning(held, self.num_bytes)
                        yield bytes(held)
                        held.clear()
        self._take_text(name, text)
        self._check_complete()
        _check_beginning(held, self.num_bytes)
        if held:
            yield bytes(held)

    def record(self, tenant: str, file_id: str, digest: str, now: int) -> FileRecord:
        """Return the record of the file, which is stored as of `now`, in Unix seconds."""
        return FileRecord(
            id=file_id,
            tenant=tenant,
            filename=self.filename or "upload",
            purpose=_ANTHROPIC_PURPOSE if self.is_from_anthropic else cast("Purpose", self.texts["purpose"]),
            num_bytes=self.num_bytes,
            sha256=digest,
            created_at=now,
            expires_at=now + self._expiry_s(),
            mime_type=self.mime_type,
        )

    def _begin(self, start: FieldStart) -> str:
        name = start.name
        known = _ANTHROPIC_FIELDS if self.is_from_anthropic else _FIELDS
        if name not in known and not self.allow_unknown:
            raise unknown_parameter(name[:64])
        if name in self.texts or (name == "file" and self.filename is not None):
            raise invalid_value(name, f"'{name}' stands in the form more than once.")
        if name == "file":
            self.filename, self.mime_type = checked_filename(start.filename or ""), start.mime_type
        return name

    def _take_text(self, name: str, text: bytearray) -> None:
        if name and name != "file":
            self.texts[name] = text.decode("utf-8", "replace")

    def _check_complete(self) -> None:
        if not self.form.is_complete:
            message = "The body ends before its last boundary: the upload was cut off. Send it again."
            raise ApiError(400, message, code="truncated_upload")
        if self.filename is None:
            raise missing_parameter("file", "the file to upload")
        if not self.is_from_anthropic:
            _check_purpose(self.texts.get("purpose"))
        if not self.num_bytes:
            raise ApiError(400, "The file is empty.", param="file", code="empty_file")
        self._expiry_s()

    def _expiry_s(self) -> int:
        if self.is_from_anthropic:
            told = self.texts.get("expires_in_seconds")
            return DEFAULT_EXPIRY_S if told is None else checked_expiry("expires_in_seconds", told)
        anchor, seconds = self.texts.get("expires_after[anchor]"), self.texts.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return DEFAULT_EXPIRY_S
        if anchor != "created_at":
            raise invalid_value("expires_after[anchor]", "'expires_after[anchor]' must be 'created_at'.")
        return checked_expiry("expires_after[seconds]", seconds or "")


def _check_purpose(purpose: str | None) -> None:
    if purpose is None:
        raise missing_parameter("purpose", f"which must be one of {', '.join(UPLOADED)}")
    if purpose not in UPLOADED:
        message = f"'purpose' must be one of {', '.join(UPLOADED)}; {purpose[:64]!r} is not served."
        raise invalid_value("purpose", message)


def checked_expiry(name: str, seconds: str) -> int:
    """Return the seconds that a file is kept; `ApiError` 400 if out of range."""
    least, most = _EXPIRY_S
    if _SECONDS.fullmatch(seconds) is None or not least <= int(seconds) <= most:
        raise invalid_value(name, f"'{name}' must be a whole number from {least} to {most}.")
    return int(seconds)


def _check_beginning(held: bytearray, num_bytes: int) -> None:
    kind = _COMPRESSED.get(bytes(held[:2])) if num_bytes == len(held) else None
    if kind is not None:
        message = f"The file is compressed ({kind}). Upload it as text, one JSON object a line."
        raise ApiError(400, message, param="file", code="invalid_file_format")
