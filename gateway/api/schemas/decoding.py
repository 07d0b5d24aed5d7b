"""Decode an untrusted JSON body into a typed struct, with errors that a client can act on.

One typed decode in C refuses wrong types, values out of range, NaN, infinities, and nesting that would exhaust the
stack. It refuses names too that no field has; only then, or where a value is wrong, the table of parameters is asked
which names change nothing and may be taken out, and the body is decoded once more. A surrogate without its other half,
as a program leaves it that cuts texts by UTF-16 units, is read as U+FFFD.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import msgspec

from gateway.api.schemas.checks import invalid_value, missing_parameter, unknown_parameter
from gateway.api.schemas.names import STRICT, BodyRules, Kind, ParameterTable, without_ignored
from gateway.errors import ApiError
from shared.field_problem import field_problem

T = TypeVar("T")

_MODEL = "one that `GET /v1/models` lists"
# Workers check the least, which goes by their blocks; below 1 no worker is asked.
_LEAST_BUDGET = "'kv_budget.tokens' must be at least four blocks: 64, or what --block-size makes of it."
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Smaller bodies have no more than are decoded in some tenth of a second.
_SMALL_BODY = 1 << 20
MAX_CONTAINERS = 100_000
"""Lists and objects of a body. Decoding holds up the event loop, whichever thread does it."""
MAX_ENTRIES = 1 << 21
"""Commas between values of a body: one prompt may have 1,048,576 token ids."""
# A pair of surrogates.
_LONGEST_ESCAPE = 12
# Some 3 ms.
_PIECE_BYTES = 256 << 10
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)$")
_KEY_BEFORE_VALUE = re.compile(rb'"(\w{1,64})"\s{0,16}:\s{0,16}-?\Z')
# A backslash, or a pair of surrogates, which stay as they are; or else a surrogate alone.
_SURROGATE = re.compile(
    rb"(\\\\|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})|\\u[dD][89a-fA-F][\da-fA-F]{2}"
)


class BodyReader(Generic[T]):
    """Reads the bodies of one endpoint."""

    def __init__(self, table: ParameterTable, kind: Kind, struct: type[T]) -> None:
        self._table = table
        self._kind = kind
        self._decoder = msgspec.json.Decoder(struct)

    def read(self, body: bytes, rules: BodyRules = STRICT) -> T:
        """Decode a request body; `rules` are exceptions from the table.

        Raises:
            ApiError: 400; `param` names the field at fault as in `messages.[1].content`, where one is known.
        """
        parsed = _decode_or_refuse(self._decoder, body, partial(self._decode, body, rules))
        if rules.model is not None and getattr(parsed, "model", None) is not None:
            parsed.model = rules.model  # type: ignore[attr-defined]
        return parsed

    def _decode(self, body: bytes, rules: BodyRules) -> T:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            # What msgspec takes for no JSON at all may be half a surrogate.
            whole = without_lone_surrogates(body)
            if whole == body and not isinstance(error, msgspec.ValidationError):
                raise
        return self._decoder.decode(without_ignored(whole, self._table, self._kind, rules))


def decode_typed(struct: type[T], body: bytes) -> T:
    """Decode a body whose names are not in the table of parameters."""
    decoder = msgspec.json.Decoder(struct)
    return _decode_or_refuse(decoder, body, lambda: decoder.decode(body))


def _decode_or_refuse(decoder: msgspec.json.Decoder[T], body: bytes, decode: Callable[[], T]) -> T:
    """Return what `decode` makes of a body.

    Raises:
        ApiError: 400; it cannot be decoded. 413; it has too many values.
    """
    _check_number_of_values(body)
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8 (byte {error.start}).", code="invalid_json") from None
    try:
        return decode()
    except msgspec.ValidationError as error:
        raise _from_validation(error, decoder.type) from None
    except msgspec.DecodeError as error:
        raise _from_syntax(str(error), body) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def _check_number_of_values(body: bytes) -> None:
    if len(body) <= _SMALL_BODY or not _has_too_many_values(body):
        return
    # Texts may have as many of these characters as they like. Of more texts than this the rest counts as it is.
    if _has_too_many_values(_STRING.sub(b"", body, count=MAX_ENTRIES // 4)):
        limits = f"{MAX_CONTAINERS} lists and objects, or {MAX_ENTRIES} commas between values"
        raise ApiError(413, f"The body has more than {limits}. Send fewer values.", code="request_too_large")


def _has_too_many_values(body: bytes) -> bool:
    return body.count(b"[") + body.count(b"{") > MAX_CONTAINERS or body.count(b",") > MAX_ENTRIES


def without_lone_surrogates(body: bytes) -> bytes:
    """Return JSON in which each escaped surrogate without its other half is U+FFFD, the replacement character."""
    if rb"\ud" not in body and rb"\uD" not in body:
        return body
    return b"".join([_SURROGATE.sub(lambda found: found[1] or rb"\ufffd", piece) for piece in _pieces(body)])


def _pieces(body: bytes) -> Iterator[bytes]:
    """Cut a body where it has no escape: a pattern holds the interpreter's lock for as long as it searches."""
    at = 0
    while at < len(body):
        end = at + _PIECE_BYTES
        while end < len(body) and b"\\" in body[end - _LONGEST_ESCAPE : end]:
            end += _LONGEST_ESCAPE
        yield body[at:end]
        at = end


def _from_syntax(text: str, body: bytes) -> ApiError:
    if not body.strip():
        return ApiError(400, "The body is empty: send a JSON object.", code="invalid_json")
    if body.startswith(_BYTE_ORDER_MARK):
        problem = "The body is not valid JSON: it begins with a byte order mark. Save it as UTF-8 without one."
        return ApiError(400, problem, code="invalid_json")
    position = _BYTE_POSITION.search(text)
    end = int(position[1]) if position else 0
    key = _KEY_BEFORE_VALUE.search(body, max(0, end - 128), end)
    param = key[1].decode() if key else None
    where = f" in the value of '{param}'" if param else ""
    message = f"The body is not valid JSON{where}: {text}.{_what_to_write(body, end)}"
    return ApiError(400, message, param=param, code="invalid_json")


def _what_to_write(body: bytes, end: int) -> str:
    """Return advice about the place where the JSON becomes invalid; empty if there is none."""
    if body.startswith(b"'", end):
        return " Write double quotes."
    if body.startswith((b"True", b"False", b"None"), end):
        return " Write true, false or null."
    return "" if body.lstrip().startswith(b"{") else " Send a JSON object, no form."


def _from_validation(error: msgspec.ValidationError, body: object) -> ApiError:
    problem = field_problem(error)
    if problem.kind == "unknown":
        assert problem.field is not None
        return unknown_parameter(problem.field)
    if problem.kind == "missing":
        assert problem.field is not None
        return missing_parameter(problem.field, _MODEL if problem.field == "model" else "")
    if problem.text.startswith("invalid enum value") and problem.field is not None:
        allowed = ", ".join(allowed_values(body, problem.field))
        return invalid_value(problem.field, f"'{problem.field}' must be one of {allowed}.")
    if problem.field == "kv_budget.tokens" and problem.text.endswith(">= 1"):
        return invalid_value(problem.field, _LEAST_BUDGET)
    advice = _URL_ITSELF if (problem.field or "").endswith(".image_url") and "got object" in problem.text else ""
    return invalid_value(problem.field, f"{problem.subject('The body')} is invalid: {problem.text}.{advice}")


_URL_ITSELF = " Give the URL itself, and `detail` beside it."
_INDEX = re.compile(r"\[\d+\]")


def allowed_values(body: object, place: str) -> list[str]:
    """Return the texts of which one must stand at a place such as `messages.[0].role`."""
    parts = [part for part in place.split(".") if not _INDEX.fullmatch(part)]
    return list(dict.fromkeys(_values(body, parts)))


def _values(found: object, parts: list[str]) -> Iterator[str]:
    # Only the types on the way are looked at: `msgspec.inspect` reads all that a body may hold, in some 10 ms.
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        for field in msgspec.structs.fields(found) if parts else ():
            if field.encode_name == parts[0]:
                yield from _values(field.type, parts[1:])
    elif typing.get_origin(found) is typing.Literal:
        yield from () if parts else map(str, typing.get_args(found))
    else:
        for inner in typing.get_args(found):
            yield from _values(inner, parts)
