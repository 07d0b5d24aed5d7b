"""Reads `multipart/form-data` as it arrives (RFC 7578): fields are small and kept, files are passed on in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from gateway.errors import ApiError

MAX_FIELDS = 32
MAX_FIELD_BYTES = 16 << 10
_MAX_HEADER_BYTES = 8 << 10
# RFC 2046, and as long as any client makes it.
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,199}[0-9A-Za-z'()+_,./:=?-]")
# Possessive throughout: a head of a stranger takes time in proportion to its length.
_PARAMETER = re.compile(
    r"""[ \t]*+;[ \t;]*+(?:([^\s=;"]++)[ \t]*+=[ \t]*+(?:"((?:[^"\\]|\\.)*+)"|([^;"]*+)))?""", re.DOTALL
)
_MIME_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}", re.ASCII)
_ESCAPED = re.compile(r"""\\(["\\])""")
_FOLD = re.compile(r"\r\n[ \t]++")
# RFC 8187: character sets that an extended file name may declare.
_CHARSETS = frozenset({"utf-8", "iso-8859-1"})


class FieldStart(NamedTuple):
    """The head of a field; `filename` is None for a text, and `mime_type` where the field says none."""

    name: str
    filename: str | None
    mime_type: str | None = None


class FormData:
    """Takes the bytes of a body, and yields the start and the content of each field."""

    def __init__(self, content_type: str) -> None:
        """Read a body of this type; `ApiError` 400 if it is not form data, or names no boundary."""
        media_type, parameters = _with_parameters(content_type)
        boundary = (parameters or {}).get("boundary", "")
        if media_type != "multipart/form-data" or _BOUNDARY.fullmatch(boundary) is None:
            text = "Send the file as multipart/form-data, with the fields 'file' and 'purpose'."
            raise ApiError(400, text, code="invalid_content_type")
        # A line break before the first boundary too: it may be the first line.
        self._buffer = bytearray(b"\r\n")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._is_in_field = False
        self._num_fields = 0
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[FieldStart | bytes]:
        """Take bytes, and yield what has become certain; `ApiError` 400 for broken form data."""
        self._buffer += data
        while not self.is_complete:
            at = self._buffer.find(self._delimiter)
            if self._is_in_field:
                # The end of what there is may be the beginning of a delimiter.
                end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
                if end:
                    yield bytes(self._buffer[:end])
                    del self._buffer[:end]
                    at = 0 if at >= 0 else -1
            if at < 0:
                if not self._is_in_field and len(self._buffer) > _MAX_HEADER_BYTES:
                    raise _broken("no boundary comes where a field should begin")
                return
            start = self._next_field(at + len(self._delimiter))
            if start is None:
                return
            yield start
        self._buffer.clear()

    def _next_field(self, at: int) -> FieldStart | None:
        """Return the field behind a delimiter; None while its head is incomplete, or behind the last one."""
        if self._buffer[at : at + 2] == b"--":
            self.is_complete = True
            return None
        end = self._buffer.find(b"\r\n\r\n", at, at + _MAX_HEADER_BYTES + 4)
        if end < 0:
            if len(self._buffer) - at > _MAX_HEADER_BYTES:
                raise _broken(f"the head of a field is longer than {_MAX_HEADER_BYTES} bytes")
            return None
        if self._buffer[at : at + 2] != b"\r\n":
            raise _broken("a boundary does not end its line")
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise _broken(f"it has more than {MAX_FIELDS} fields")
        head = self._buffer[at + 2 : end].decode("utf-8", "replace")
        del self._buffer[: end + 4]
        self._is_in_field = True
        return _field_start(head)


def _field_start(head: str) -> FieldStart:
    headers: dict[str, str] = {}
    for line in _FOLD.sub(" ", head).split("\r\n"):
        header, _, value = line.partition(":")
        headers.setdefault(header.strip().lower(), value)
    if "content-disposition" not in headers:
        raise _broken("a field has no name")
    parameters = _with_parameters(headers["content-disposition"])[1]
    if parameters is None:
        raise _broken("the Content-Disposition of a field cannot be read")
    if "name" not in parameters:
        raise _broken("a field has no name")
    filename = parameters.get("filename")
    if "filename*" in parameters:
        filename = _decoded(parameters["filename*"])
    kind = _MIME_TYPE.match(headers.get("content-type", "").strip())
    return FieldStart(parameters["name"], filename, None if kind is None else kind[0].lower())


def _with_parameters(value: str) -> tuple[str, dict[str, str] | None]:
    """Return the value of a header and its parameters, the first of each name; None if they cannot be read."""
    value = value.strip()
    kind, parameters = value.partition(";")[0], dict[str, str]()
    at = len(kind)
    while at < len(value):
        match = _PARAMETER.match(value, at)
        if match is None:
            return kind.strip().lower(), None
        name, quoted, plain = match.groups()
        if name is not None:
            text = plain.strip() if quoted is None else _ESCAPED.sub(r"\1", quoted)
            parameters.setdefault(name.lower(), text)
        at = match.end()
    return kind.strip().lower(), parameters


def _decoded(extended: str) -> str:
    """Return the text of an extended value, `charset'language'percent-encoded` (RFC 8187)."""
    charset, _, rest = extended.partition("'")
    _, quote, encoded = rest.partition("'")
    try:
        if quote and charset.lower() in _CHARSETS:
            return unquote_to_bytes(encoded).decode(charset)
    except UnicodeDecodeError:
        pass
    raise _broken("the 'filename*' of a field has to be UTF-8''..., percent-encoded")


def _broken(problem: str) -> ApiError:
    return ApiError(400, f"The body is not valid multipart/form-data: {problem}.", code="invalid_form_data")
