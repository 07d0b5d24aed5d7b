"""Checks of query parameters."""

from __future__ import annotations

from starlette.requests import Request

from gateway.api.schemas.checks import invalid_value, unknown_parameter


def check_query(request: Request, known: frozenset[str], *, allow_unknown: bool) -> None:
    """Refuse unknown query parameters.

    Raises:
        ApiError: 400; it names the first.
    """
    for name in request.query_params:
        if name not in known and not allow_unknown:
            raise unknown_parameter(name)


def whole_number(text: str | None, name: str, least: int, most: int, default: int) -> int:
    """Return a parameter's value, `default` without one.

    Raises:
        ApiError: 400; it is not a whole number from `least` to `most`.
    """
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) or not least <= int(text) <= most:
        raise invalid_value(name, f"'{name}' must be a whole number from {least} to {most}.")
    return int(text)


def is_ascending(request: Request) -> bool:
    """Whether `order` asks for the oldest objects first.

    Raises:
        ApiError: 400; it is neither `asc` nor `desc`.
    """
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", "'order' must be 'asc' or 'desc'.")
    return order == "asc"
