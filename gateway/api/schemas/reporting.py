"""What an answer is asked to report: log probabilities and details, from the fields of a body."""

from __future__ import annotations

from gateway.api.schemas.parameters import CommonBody
from gateway.generation import Details
from shared.bounds import MAX_LOGPROBS


def num_logprobs(value: int | None) -> int | None:
    """Return how many alternatives to report; -1 asks for as many as are ever reported."""
    return MAX_LOGPROBS if value == -1 else value


def prompt_logprobs(body: CommonBody, echoed: int | None) -> int | None:
    """Return how many alternatives to compute for the prompt's tokens.

    Args:
        body: May ask for them by themselves.
        echoed: How many of an echoed prompt are shown before those of the answer.
    """
    asked = num_logprobs(body.prompt_logprobs)
    return asked if echoed is None else max(echoed, asked or 0)


def details(body: CommonBody, *, echoes_logprobs: bool = False, opening: str = "") -> Details | None:
    """Return what the answer reports besides, or None for nothing."""
    has_prompt_logprobs = body.prompt_logprobs is not None
    usage_so_far = body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
    token_ids, tokens_as_ids = bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
    if not (token_ids or tokens_as_ids or has_prompt_logprobs or usage_so_far or opening):
        return None
    return Details(token_ids, has_prompt_logprobs, echoes_logprobs, tokens_as_ids, usage_so_far, opening)
