"""How OpenAI's formats tell log probabilities, calls of tools, reasoning, and why a choice ended, whole or in chunks.

The format has one reason, `length`, for a text that ended at the limit that its client set and for one that ended
before it, because the model's context was full. A choice whose context was full says so in `stop_reason`, a field that
vLLM's choices have too; Anthropic's format has the same word for it as a reason of its own. Log probabilities are
nested for chat, and parallel lists for completions.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from shared.messages import Delta, Finish, TokenLogprob

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


# JSON has no infinity; OpenAI's API uses this number for "never".
_LEAST = -9999.0


def chat_logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    content = [_chat_entry(entry) | {"top_logprobs": [_chat_entry(top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": _finite(entry.logprob), "bytes": list(entry.bytes)}


def completion_logprobs(entries: Sequence[TokenLogprob | None], offset: int, first_token: str = "") -> dict[str, Any]:
    """Return the `logprobs` object of a completion choice.

    Args:
        entries: Tokens in order; None for the prompt's first token, whose probability has no condition.
        offset: Characters of the choice's text before these tokens.
        first_token: What the token that is None is called.
    """
    tokens = [first_token if entry is None else entry.token for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _alternatives(entry) for entry in entries],
        "text_offset": offsets,
    }


def prompt_logprob_fields(entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Return a prompt's log probabilities as vLLM reports them: for each token, its own and the likeliest, by id.

    The rank of a token that is not among the likeliest is not known.
    """
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprob) -> dict[str, Any]:
    fields: dict[str, Any] = {str(entry.token_id): _ranked(entry, None)}
    return fields | {str(top.token_id): _ranked(top, rank) for rank, top in enumerate(entry.top, 1)}


def _ranked(entry: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(entry.logprob), "rank": rank, "decoded_token": entry.token}


def first_token_name(delta: Delta) -> str:
    """Return what a prompt's first token, which has no entry, is called: what the text has before all other tokens.

    A delta that still has the prompt's token ids here is of an answer that calls its tokens by their ids.
    """
    if delta.prompt_token_ids:
        return token_id_name(delta.prompt_token_ids[0])
    entries = (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))
    num_rest = sum(len(entry.bytes) for entry in entries if entry is not None)
    raw = delta.text.encode()
    return raw[: max(0, len(raw) - num_rest)].decode(errors="replace")


def token_id_name(token_id: int) -> str:
    """Return what a token is called that is called by its id."""
    return f"token_id:{token_id}"


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    alternatives = {top.token: _finite(top.logprob) for top in entry.top}
    alternatives.setdefault(entry.token, _finite(entry.logprob))
    return alternatives


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
