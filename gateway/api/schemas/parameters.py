"""The parameters that both completion endpoints share, their form on the wire, and the details that answers report.

The bounds are those of `shared.bounds`; `to_sampling` and its neighbours check what a type cannot express.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from gateway.api.schemas.checks import ModelName, checked_model, invalid_value, require_text
from gateway.api.schemas.names import described
from gateway.api.schemas.shared_fields import sampling_of
from gateway.api.schemas.structured_output import StructuredOutputFields
from gateway.generation import Details, Generation, Prompt, Ranking
from shared.bounds import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGPROB_TOKENS,
    MAX_LOGPROBS,
    MAX_OUTPUT_TOKENS,
    MAX_SEQUENCES,
    MAX_STOP_TOKENS,
    BadWord,
    Biases,
    CacheSalt,
    NumOutputTokens,
    NumTruncatedTokens,
    RepetitionPenalty,
    TokenId,
)
from shared.kv_budget import KvPolicy, NumBudgetTokens
from shared.sampling import Sampling

UserText = Annotated[str, Meta(max_length=512)]
# Some clients send an object that describes the end user.
EndUser = UserText | Annotated[dict[UserText, Raw], Meta(max_length=64)]

# -1 asks for as many as are ever reported.
AskedLogprobs = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Reports of a stream besides its text."""

    include_usage: Annotated[bool | None, described("End the stream with a chunk that counts tokens.", True)] = None
    continuous_usage_stats: Annotated[bool | None, described("Count tokens in every chunk.", True)] = None
    resumable: Annotated[
        bool | None,
        described("Give events ids, and keep the stream: `GET /v1/streams/{id}` goes on after any event.", True),
    ] = None


class KvBudgetBody(Struct, forbid_unknown_fields=True):
    """A bound on the memory that a text takes while it is computed."""

    tokens: Annotated[
        NumBudgetTokens,
        described("Tokens that are kept at most, 64 or more (four blocks of 16); rounded down to whole blocks."),
    ]
    policy: Annotated[
        KvPolicy | None,
        described(
            "Which ones are kept: `sinks`, the default, keeps the first and the last ones. `heavy_hitters` and "
            "`persistence` keep these and what got the most attention, or got much the most often; with them, texts "
            "are not promised to be equal when they are generated again."
        ),
    ] = None


class CommonBody(StructuredOutputFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both bodies. None always means: left out."""

    model: Annotated[ModelName, described("The model to use.")]
    # -1 is how some clients say that only the context bounds the answer; of llama.cpp's `n_predict`, -2 too.
    max_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_OUTPUT_TOKENS)] | None,
        described("Tokens to generate at most; -1 for no limit but the context, which may end the answer earlier.", 3),
    ] = None
    n_predict: Annotated[
        Annotated[int, Meta(ge=-2, le=MAX_OUTPUT_TOKENS)] | None, described("llama.cpp's name of `max_tokens`.", 3)
    ] = None
    min_tokens: Annotated[
        NumOutputTokens | None,
        described("The answer does not end before it has this many tokens, unless nothing else may follow.", 2),
    ] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None, described("Answers to the same prompt.", 2)] = (
        None
    )
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None,
        described(
            "Generate this many answers to each prompt, and tell the `n` likeliest by the mean log probability of "
            "their tokens, the best first; not with `stream`. `usage` counts the tokens of all.",
            2,
        ),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None, described("Tokens that end the answer.", [7])
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, described("The text that ended the answer is part of it.", True)
    ] = None
    skip_special_tokens: Annotated[bool | None, described("False leaves special tokens in the text.", False)] = None
    repeat_penalty: Annotated[RepetitionPenalty | None, described("llama.cpp's name of `repetition_penalty`.", 1.1)] = (
        None
    )
    logit_bias: Annotated[Biases | None, described("Maps token ids to biases of their logits.", {"5": -100})] = None
    logprob_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKENS)] | None,
        described("Report these tokens' log probabilities instead of the likeliest ones'; only with `logprobs`."),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None,
        described("No other tokens are generated.", [5, 6]),
    ] = None
    bad_words: Annotated[
        Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None,
        described(
            "Texts that are not generated, as the tokens that spell them with a space before and without.", ["bad"]
        ),
    ] = None
    stream: Annotated[bool | None, described("Send the answer as server-sent events.", True)] = None
    stream_options: Annotated[
        StreamOptions | None, described("What a stream reports besides text; only with `stream`.")
    ] = None
    user: Annotated[
        EndUser | None, described("The end user, a name or an object; checked and without influence.", "someone")
    ] = None
    prompt_logprobs: Annotated[
        AskedLogprobs | None,
        described("Report the log probabilities of the prompt, with this many alternatives; -1 for 20.", 2),
    ] = None
    return_token_ids: Annotated[bool | None, described("Report the token ids of prompt and answer.", True)] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, described("Log probabilities call tokens `token_id:5`.", True)
    ] = None
    truncate_prompt_tokens: Annotated[
        NumTruncatedTokens | None,
        described("Use only this many of the prompt's last tokens; -1 for what fits beside `max_tokens`.", 5),
    ] = None
    cache_salt: Annotated[
        CacheSalt | None, described("Only requests with the same salt share cached prompts and answers.", "mine")
    ] = None
    kv_budget: Annotated[
        KvBudgetBody | None,
        described(
            "How many tokens of the text the model keeps; it forgets the others. `usage.evicted_tokens` tells how many "
            "it had forgotten at the end. See [long contexts](long-contexts.md).",
            {"tokens": 512},
        ),
    ] = None


def to_sampling(
    body: CommonBody, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """Return the wire's sampling parameters."""
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid_value("min_tokens", f"'min_tokens' must not be larger than the {max_tokens} tokens at most.")
    more: dict[str, Any] = {"prompt_logprobs": prompt_logprobs}
    penalty = one_of(body, "repetition_penalty", "repeat_penalty")
    if penalty is not None:
        more["repetition_penalty"] = penalty
    if body.bad_words:
        more["bad_words"] = tuple(require_text("bad_words", word) for word in body.bad_words)
    return sampling_of(body, max_tokens, logprobs, **more)


def one_of(body: CommonBody, name: str, other: str) -> Any:
    """Return the value of a parameter that has two names, or None."""
    value, same = getattr(body, name), getattr(body, other)
    if value is None:
        return same
    if same not in (None, value):
        raise invalid_value(other, f"'{other}' and '{name}' mean the same, and differ. Give one of them.")
    return value


def check_names(body: CommonBody) -> None:
    """Check the strings that become names: the model, the end user, the salt."""
    checked_model(body.model)
    if isinstance(body.user, str):
        require_text("user", body.user)
    if body.cache_salt is not None:
        require_text("cache_salt", body.cache_salt)


def check_stream_options(body: CommonBody) -> bool:
    """Return whether a stream ends with a usage chunk."""
    options = body.stream_options
    if options is None or not (options.include_usage or options.continuous_usage_stats or options.resumable):
        return False
    if not body.stream:
        raise invalid_value("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    return bool(options.include_usage)


def check_sequences(num_prompts: int, n: int, name: str = "n") -> None:
    """Check how many answers one request asks for with a parameter."""
    if num_prompts * n > MAX_SEQUENCES:
        message = f"'{name}' times the number of prompts is {num_prompts * n}; at most {MAX_SEQUENCES} are allowed."
        raise invalid_value(name, message)


def counted(prompts: tuple[Prompt, ...], limit: int | None) -> tuple[Prompt, ...]:
    """Return prompts that are estimated to have no more than the tokens that count, by `truncate_prompt_tokens`."""
    if limit is None or limit < 0:
        return prompts
    if limit == 0:
        raise invalid_value("truncate_prompt_tokens", "'truncate_prompt_tokens' must be at least 1, or -1.")
    return tuple(replace(prompt, estimated_tokens=min(prompt.estimated_tokens, limit)) for prompt in prompts)


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
    """Return the details that the answer reports, or None if it reports only the text."""
    has_prompt_logprobs = body.prompt_logprobs is not None
    usage_so_far = body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
    token_ids, tokens_as_ids = bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
    if not (token_ids or tokens_as_ids or has_prompt_logprobs or usage_so_far or opening):
        return None
    return Details(token_ids, has_prompt_logprobs, echoes_logprobs, tokens_as_ids, usage_so_far, opening)


def with_best_of(generation: Generation, best_of: int) -> Generation:
    """Return a generation that makes `best_of` sequences of each prompt, of which the `n` likeliest are returned.

    With temperature 0 all sequences of a prompt are equal: any `n` are the best, and no more are generated.
    """
    n = generation.n
    if best_of == n:
        return generation
    if best_of < n:
        message = f"'best_of' is {best_of} and 'n' is {n}: 'best_of' must be at least 'n'. Raise it, or lower 'n'."
        raise invalid_value("best_of", message)
    if generation.stream:
        reason = "Which answers are the best is known when all are complete. Leave 'stream' or 'best_of' out."
        raise invalid_value("best_of", f"Results cannot be streamed when 'best_of' is greater than 'n'. {reason}")
    check_sequences(len(generation.prompts), best_of, "best_of")
    sampling = generation.sampling
    if sampling.temperature == 0:
        return generation
    ranking = Ranking(num_returned=n, shows_logprobs=sampling.logprobs is not None)
    sampling = msgspec.structs.replace(sampling, logprobs=sampling.logprobs or 0)
    return msgspec.structs.replace(generation, n=best_of, sampling=sampling, ranking=ranking)


def without_ranking(generation: Generation) -> Generation:
    """Return a generation that makes only the sequences that are returned: all of a prompt are equal.

    For a temperature of 0 that its model advises, and that is not known yet when its body is read.
    """
    ranking = generation.ranking
    if ranking is None:
        return generation
    sampling = generation.sampling
    if not ranking.shows_logprobs:
        sampling = msgspec.structs.replace(sampling, logprobs=None)
    return msgspec.structs.replace(generation, n=ranking.num_returned, sampling=sampling, ranking=None)
