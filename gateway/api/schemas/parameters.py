"""The parameters that both completion endpoints share, and what they become.

The bounds are those of `shared.bounds`; what a type cannot say is checked in `to_sampling` and its neighbours.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.api.schemas.decoding import require_text
from gateway.api.schemas.refusals import invalid_value
from gateway.api.schemas.structured_output import StructuredOutputFields
from shared.bounds import (
    MAX_NAME_BYTES,
    MAX_SEQUENCES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    Biases,
    NumOutputTokens,
    Penalty,
    Priority,
    Probability,
    RepetitionPenalty,
    Seed,
    StopString,
    Temperature,
    TimeoutSeconds,
    TokenId,
)
from shared.sampling import Sampling


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream reports besides its text."""

    include_usage: bool | None = None


class CommonBody(StructuredOutputFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both bodies. None always means: left out."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]
    max_tokens: NumOutputTokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    # -1 is how vLLM's clients say that all tokens are kept.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    priority: Priority | None = None
    timeout: TimeoutSeconds | None = None


_COPIED = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
)


def to_sampling(
    body: CommonBody, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """Return the wire's sampling parameters.

    A request without a seed gets a random one, so that it can move to another worker; when greedy it gets 0, so that
    equal requests look equal.
    """
    values: dict[str, Any] = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    seed = body.seed
    if seed is None:
        seed = 0 if body.temperature == 0 else secrets.randbits(62)
    return Sampling(
        max_tokens=max_tokens,
        top_k=max(0, body.top_k or 0),
        seed=seed,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **values,
    )


def is_deterministic(body: CommonBody) -> bool:
    """Tell whether the same request must get the same answer: greedy, or with a seed of the client's choice."""
    return body.temperature == 0 or body.seed is not None


def check_names(body: CommonBody) -> None:
    """Check the strings that become names: the model and the end user.

    Raises:
        ApiError: 400; a name holds a NUL or is longer than its subject token may be.
    """
    require_text("model", body.model)
    if len(body.model.encode("utf-8")) > MAX_NAME_BYTES:
        raise invalid_value("model", f"'model' must be at most {MAX_NAME_BYTES} bytes long in UTF-8.")
    if body.user is not None:
        require_text("user", body.user)


def check_stream_options(body: CommonBody) -> bool:
    """Return whether a stream ends with a usage chunk.

    Raises:
        ApiError: 400; `stream_options` was given for an answer that is not a stream.
    """
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid_value("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    return bool(body.stream_options.include_usage)


def check_sequences(num_prompts: int, n: int) -> None:
    """Check how many sequences one request makes.

    Raises:
        ApiError: 400; more than `MAX_SEQUENCES`.
    """
    if num_prompts * n > MAX_SEQUENCES:
        message = f"'n' times the number of prompts is {num_prompts * n}; at most {MAX_SEQUENCES} are allowed."
        raise invalid_value("n", message)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        require_text("stop", string)
    return strings
