"""Decode an untrusted JSON body into a typed struct, with errors that a client can act on.

One typed decode in C refuses wrong types, values out of range, NaN, infinities, and nesting that would exhaust the
stack. Fields nobody reads are skipped, not built, so a body costs no more memory than its typed fields and itself.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from gateway.errors import ApiError

T = TypeVar("T")

_VALIDATION_PATH = re.compile(r"^(?P<detail>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)$")
_KEY_BEFORE_VALUE = re.compile(rb'"(\w{1,64})"\s{0,16}:\s{0,16}-?\Z')
_MISSING_FIELD = re.compile(r"^Object missing required field `(\w+)`$")
_JSON_NAMES = {"float": "number", "int": "integer", "str": "string", "bool": "boolean"}


def invalid_value(param: str | None, message: str) -> ApiError:
    """Answer for a value that is understood but not allowed."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported_parameter(param: str, message: str | None = None) -> ApiError:
    """Answer for a parameter that this server does not implement."""
    text = message or f"The parameter '{param}' is not supported by this server. Leave it out."
    return ApiError(400, text, param=param, code="unsupported_parameter")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a request body.

    Raises:
        ApiError: 400; `param` names the field at fault as in `messages.[1].content`, where one is known.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8 (byte {error.start}).", code="invalid_json") from None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _from_validation(str(error)) from None
    except msgspec.DecodeError as error:
        raise _from_syntax(str(error), body) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def is_default(raw: msgspec.Raw, defaults: tuple[object, ...]) -> bool:
    """Tell whether an undecoded field is null or one of the values that mean the same as leaving it out."""
    view = memoryview(raw)
    if len(view) > 256:
        return False
    try:
        value = msgspec.json.decode(view)
    except msgspec.DecodeError:
        return False
    return value is None or any(type(value) is type(default) and value == default for default in defaults)


def require_text(param: str, text: str) -> str:
    """Return the text if it may be tokenized and put on the wire.

    Raises:
        ApiError: 400; the text holds a NUL character.
    """
    if "\0" in text:
        raise invalid_value(param, f"'{param}' must not contain a NUL character.")
    return text


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text from its length alone: 3.5 bytes each, at least one."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8"))
    return max(1, int(num_bytes / 3.5))


def _from_syntax(text: str, body: bytes) -> ApiError:
    position = _BYTE_POSITION.search(text)
    end = int(position[1]) if position else 0
    key = _KEY_BEFORE_VALUE.search(body, max(0, end - 128), end)
    param = key[1].decode() if key else None
    where = f" in the value of '{param}'" if param else ""
    return ApiError(400, f"The body is not valid JSON{where}: {text}.", param=param, code="invalid_json")


def _from_validation(text: str) -> ApiError:
    match = _VALIDATION_PATH.match(text)
    assert match is not None
    detail, path = match["detail"], match["path"] or ""
    param = path.replace("[...]", "").replace("[", ".[").lstrip(".") or None
    missing = _MISSING_FIELD.match(detail)
    if missing is not None:
        name = f"{param}.{missing[1]}" if param else missing[1]
        message = f"Missing required parameter: '{name}'."
        return ApiError(400, message, param=name, code="missing_required_parameter")
    where = f"A key of '{param}'" if match["key"] else f"'{param}'" if param else "The body"
    expected = re.sub(r"`([^`]*)`", lambda found: _json_type(found[1]), detail)
    return invalid_value(param, f"{where} is invalid: {expected[:1].lower()}{expected[1:]}.")


def _json_type(name: str) -> str:
    return " or ".join(_JSON_NAMES.get(part, part) for part in name.split(" | "))
