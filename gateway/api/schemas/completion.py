"""What a body of `POST /v1/completions` asks for."""

from __future__ import annotations

from typing import cast

from gateway.api.schemas.best_of import with_best_of
from gateway.api.schemas.bodies import CompletionBody
from gateway.api.schemas.decoding import BodyReader
from gateway.api.schemas.known_names import STRICT, BodyRules
from gateway.api.schemas.openai_names import OPENAI_NAMES
from gateway.api.schemas.parameters import (
    check_names,
    check_sequences,
    check_stream_options,
    checked_truncation,
    counted,
    details,
    num_logprobs,
    one_of,
    prompt_logprobs,
    to_sampling,
)
from gateway.api.schemas.refusals import invalid_value
from gateway.api.schemas.sampling_fields import is_deterministic, left_out
from gateway.api.schemas.structured_output import asked_output, constrained
from gateway.api.schemas.texts import estimate_tokens
from gateway.api.schemas.unserved_names import OpenAi
from gateway.generation import Generation, Prompt

DEFAULT_MAX_TOKENS = 16

_reader = BodyReader(OPENAI_NAMES, OpenAi.COMPLETION, CompletionBody)


def parse_completion(body: bytes, rules: BodyRules = STRICT) -> Generation:
    """Turn a text completion body into what is to be generated; `rules` as in `BodyReader.read`.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    completion = _reader.read(body, rules)
    check_names(completion)
    output = asked_output(completion)
    n = completion.n or 1
    prompts = _prompts(completion, n)
    echo = bool(completion.echo)
    logprobs = num_logprobs(completion.logprobs)
    echoed = logprobs if echo else None
    limit = checked_truncation(completion.truncate_prompt_tokens)
    generation = Generation(
        kind="completion",
        model=completion.model,
        prompts=counted(prompts, limit),
        n=n,
        sampling=constrained(
            to_sampling(completion, _max_tokens(completion), logprobs, prompt_logprobs(completion, echoed)), output
        ),
        structured_output=output,
        deterministic=is_deterministic(completion),
        left_out=left_out(completion),
        stream=bool(completion.stream),
        include_usage=check_stream_options(completion),
        echo=echo,
        details=details(completion, echoes_logprobs=echoed is not None),
        add_special_tokens=completion.add_special_tokens is not False,
        truncate_prompt_tokens=limit,
        cache_salt=completion.cache_salt,
        priority=completion.priority or 0,
        timeout_s=completion.timeout,
    )
    return with_best_of(generation, completion.best_of)


def _max_tokens(completion: CompletionBody) -> int | None:
    asked: int | None = one_of(completion, "max_tokens", "n_predict")
    if asked is None:
        return DEFAULT_MAX_TOKENS
    if asked == 0 and not (completion.echo or completion.prompt_logprobs is not None):
        raise invalid_value("max_tokens", "'max_tokens' is invalid: expected integer >= 1, -1, or 0 with 'echo'.")
    return None if asked < 0 else asked


def _prompts(completion: CompletionBody, n: int) -> tuple[Prompt, ...]:
    prompt, suffix = completion.prompt, completion.suffix or None
    if isinstance(prompt, str):
        check_sequences(1, n)
        return (_text_prompt(prompt, suffix),)
    kinds = {type(item) for item in prompt}
    num_prompts = 1 if kinds == {int} else len(prompt)
    check_sequences(num_prompts, n)
    if kinds == {str}:
        return tuple(_text_prompt(text, suffix) for text in cast("list[str]", prompt))
    if suffix is not None:
        raise invalid_value("suffix", "'suffix' needs a 'prompt' that is a text or a list of texts.")
    if kinds == {int}:
        return (token_prompt(cast("list[int]", prompt), "prompt"),)
    if kinds == {list}:
        return tuple(token_prompt(ids, f"prompt.[{i}]") for i, ids in enumerate(cast("list[list[int]]", prompt)))
    raise invalid_value(
        "prompt", "'prompt' must be a string, or a list of strings, of token ids, or of token id lists."
    )


def _text_prompt(text: str, suffix: str | None) -> Prompt:
    if suffix is None:
        return Prompt(estimated_tokens=estimate_tokens(text), text=text)
    tokens = estimate_tokens(text) + estimate_tokens(suffix)
    return Prompt(estimated_tokens=tokens, text=text, suffix=suffix)


def token_prompt(token_ids: list[int], where: str) -> Prompt:
    """Return a prompt of token ids that stand in the field `where`.

    Raises:
        ApiError: 400; there are none.
    """
    if not token_ids:
        raise invalid_value(where, f"'{where}' must not be empty.")
    return Prompt(estimated_tokens=len(token_ids), token_ids=tuple(token_ids))
