"""Whether a text ended at the limit that its client set, or before it, because the model's context was full.

OpenAI's format has one reason for both, `length`. A choice whose context was full says so in `stop_reason`, a field
that vLLM's choices have too; Anthropic's format has the same word for it as a reason of its own.
"""

from __future__ import annotations

from shared.messages import Finish

CONTEXT_FULL = "model_context_window_exceeded"


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
