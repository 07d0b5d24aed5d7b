"""What is checked and estimated of a text in a body."""

from __future__ import annotations

from gateway.api.schemas.refusals import invalid_value


def require_text(param: str, text: str) -> str:
    """Return the text if it may name or delimit something; prompts, of which none is asked, hold any character.

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
