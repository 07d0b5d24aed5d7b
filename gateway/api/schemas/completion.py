"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, cast

import msgspec
from msgspec import Meta

from gateway.api.schemas.decoding import decode_body, estimate_tokens, require_text
from gateway.api.schemas.parameters import (
    CommonBody,
    check_names,
    check_sequences,
    check_stream_options,
    is_deterministic,
    to_sampling,
)
from gateway.api.schemas.refusals import invalid_value
from gateway.api.schemas.row import Kind
from gateway.api.schemas.structured_output import asked_output, constrained
from gateway.generation import Generation, Prompt
from shared.bounds import MAX_PROMPT_TOKENS, NumLogprobs, TokenId

DEFAULT_MAX_TOKENS = 16

TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]


class CompletionBody(CommonBody, kw_only=True):
    """The whole body."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    logprobs: NumLogprobs | None = None
    echo: bool | None = None


_decoder = msgspec.json.Decoder(CompletionBody)


def parse_completion(body: bytes, allow_unknown: bool = False) -> Generation:
    """Turn a text completion body into what is to be generated; `allow_unknown` is as in `decode_body`.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    completion = decode_body(_decoder, Kind.COMPLETION, body, allow_unknown)
    check_names(completion)
    output = asked_output(completion)
    n = completion.n or 1
    prompts = _prompts(completion.prompt, n)
    echo = bool(completion.echo)
    logprobs = completion.logprobs
    return Generation(
        kind="completion",
        model=completion.model,
        prompts=prompts,
        n=n,
        sampling=constrained(
            to_sampling(completion, _max_tokens(completion), logprobs, logprobs if echo else None), output
        ),
        structured_output=output,
        deterministic=is_deterministic(completion),
        stream=bool(completion.stream),
        include_usage=check_stream_options(completion),
        echo=echo,
        priority=completion.priority or 0,
        timeout_s=completion.timeout,
    )


def _max_tokens(completion: CompletionBody) -> int:
    if completion.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    if completion.max_tokens == 0 and not completion.echo:
        raise invalid_value("max_tokens", "'max_tokens' is invalid: expected integer >= 1, or 0 when 'echo' is true.")
    return completion.max_tokens


def _prompts(prompt: str | list[str | int | list[int]], n: int) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        check_sequences(1, n)
        return (_text_prompt(prompt, "prompt"),)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        check_sequences(1, n)
        return (_token_prompt(cast("list[int]", prompt), "prompt"),)
    check_sequences(len(prompt), n)
    if kinds == {str}:
        return tuple(_text_prompt(text, f"prompt.[{i}]") for i, text in enumerate(cast("list[str]", prompt)))
    if kinds == {list}:
        return tuple(_token_prompt(ids, f"prompt.[{i}]") for i, ids in enumerate(cast("list[list[int]]", prompt)))
    raise invalid_value(
        "prompt", "'prompt' must be a string, or a list of strings, of token ids, or of token id lists."
    )


def _text_prompt(text: str, where: str) -> Prompt:
    if not text:
        raise invalid_value(where, f"'{where}' must not be empty.")
    return Prompt(estimated_tokens=estimate_tokens(text), text=require_text(where, text))


def _token_prompt(token_ids: list[int], where: str) -> Prompt:
    if not token_ids:
        raise invalid_value(where, f"'{where}' must not be empty.")
    return Prompt(estimated_tokens=len(token_ids), token_ids=tuple(token_ids))
