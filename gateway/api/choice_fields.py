"""How OpenAI's chat format tells calls of tools, reasoning, and why a choice ended, in whole answers and in chunks.

The format has one reason, `length`, for a text that ended at the limit that its client set and for one that ended
before it, because the model's context was full. A choice whose context was full says so in `stop_reason`, a field that
vLLM's choices have too; Anthropic's format has the same word for it as a reason of its own.
"""

from __future__ import annotations

import secrets
from typing import Any

from shared.messages import Finish

CONTEXT_FULL = "model_context_window_exceeded"


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


def is_context_full(finish: Finish, max_tokens: int | None) -> bool:
    """Say whether a text is shorter than its client allowed because the context holds no more.

    Args:
        finish: Its end.
        max_tokens: The client's limit; None for none but the context.
    """
    if finish.reason != "length" or finish.usage is None:
        return False
    return max_tokens is None or finish.usage.completion_tokens < max_tokens


def context_fields(finish: Finish, max_tokens: int | None) -> dict[str, str]:
    """Return what a choice of OpenAI's format tells of its end besides the reason; mostly nothing."""
    return {"stop_reason": CONTEXT_FULL} if is_context_full(finish, max_tokens) else {}
