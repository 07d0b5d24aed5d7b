"""How OpenAI's chat format tells calls of tools and reasoning, in whole answers and in chunks."""

from __future__ import annotations

import secrets
from typing import Any


def new_call_id() -> str:
    """Return the id of a call, which the client names when it gives the call's result."""
    return "call_" + secrets.token_hex(12)


def call_fields(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return the object of one call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def reasoning_fields(text: str) -> dict[str, str]:
    """Return the fields of reasoning: clients read one of these two names."""
    return {"reasoning_content": text, "reasoning": text}


def finish_reason(reason: str, num_calls: int, is_function_call: bool) -> str:
    """Return why a choice ended: a text that ended by itself and has calls ended for them."""
    if reason != "stop" or not num_calls:
        return reason
    return "function_call" if is_function_call else "tool_calls"
