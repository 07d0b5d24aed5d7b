"""What whole and streamed messages have in common: identity, usage, and why they stopped."""

from __future__ import annotations

import secrets
from typing import Any

from gateway.api.context_end import CONTEXT_FULL, is_context_full
from gateway.api.usage import UsageTotals
from shared.messages import Finish


def new_message(model: str) -> dict[str, Any]:
    """Return a message without content that has not stopped."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(0, 0, 0),
    }


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage object: cached tokens of the prompt are not input tokens."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": completion_tokens,
    }


def usage_of(totals: UsageTotals) -> dict[str, Any]:
    """Return the usage object of a complete message."""
    return usage(totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens)


def stop_fields(finish: Finish, num_calls: int, max_tokens: int | None) -> dict[str, Any]:
    """Return why a message stopped that could have had `max_tokens`."""
    stop = finish.stop if isinstance(finish.stop, str) else None
    if finish.reason == "length":
        reason = CONTEXT_FULL if is_context_full(finish, max_tokens) else "max_tokens"
    elif num_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}
