"""How tokens are chosen: the part of a request that the sampler reads, and what the output must look like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shared import bounds
from shared.errors import BadRequestError
from shared.grammar.grammar import Grammar
from shared.watermark import WatermarkKey

LEAST_TEMPERATURE = 1e-5
"""Below it, differences of logits overflow when divided by it: the most likely token takes all."""

DefaultedName = Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
"""A parameter that a model's files may advise a value for."""


class SamplingDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model's own files advise for requests that do not say. None: nothing."""

    temperature: bounds.Temperature | None = None
    top_p: bounds.Probability | None = None
    top_k: bounds.TopK | None = None
    min_p: bounds.Probability | None = None
    repetition_penalty: bounds.RepetitionPenalty | None = None


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen, and when to stop. Values are already validated and defaulted by the sender.

    Attributes:
        max_tokens: Tokens to generate at most; None means up to the model's context length.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than `min_p` times the most likely one.
        seed: Key of the counter-based random numbers. A sender that leaves it out gets 0.
        min_tokens: The text does not end before it has this many tokens, unless only its end is allowed.
        stop: Strings that end the text. They are looked for behind the first `min_tokens` tokens.
        include_stop_str_in_output: The stop string is part of the text.
        logit_bias: Token id to added logit.
        allowed_token_ids: No other tokens are generated; None allows all.
        bad_words: Texts that are not generated, as the tokens that they are encoded to with a space before and without.
        logprobs: How many most likely alternatives to report per token; None reports nothing, 0 the chosen token only.
        logprob_token_ids: Where there are any, these are reported per token instead of the most likely ones.
        prompt_logprobs: How many most likely alternatives to report for the tokens of the prompt.
        ignore_eos: Go on after the end-of-sequence token.
        grammar: What the output must look like; None for anything.
        skip_special_tokens: Leave special tokens out of the text.
        watermark: Marks the text (`shared.watermark`); None does not. A secret of the sender: it is in no log.
    """

    max_tokens: bounds.NumOutputTokens | None = None
    temperature: bounds.Temperature = 1.0
    top_p: bounds.Probability = 1.0
    top_k: bounds.TopK = 0
    min_p: bounds.Probability = 0.0
    seed: bounds.Seed = 0
    stop: Annotated[tuple[bounds.StopString, ...], Meta(max_length=bounds.MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[bounds.TokenId, ...], Meta(max_length=bounds.MAX_STOP_TOKENS)] = ()
    presence_penalty: bounds.Penalty = 0.0
    frequency_penalty: bounds.Penalty = 0.0
    repetition_penalty: bounds.RepetitionPenalty = 1.0
    logit_bias: bounds.Biases = {}
    logprobs: bounds.NumLogprobs | None = None
    logprob_token_ids: Annotated[tuple[bounds.TokenId, ...], Meta(max_length=bounds.MAX_LOGPROB_TOKENS)] = ()
    prompt_logprobs: bounds.NumLogprobs | None = None
    ignore_eos: bool = False
    min_tokens: bounds.NumOutputTokens = 0
    include_stop_str_in_output: bool = False
    allowed_token_ids: bounds.AllowedTokenIds | None = None
    bad_words: Annotated[tuple[bounds.BadWord, ...], Meta(max_length=bounds.MAX_BAD_WORDS)] = ()
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    watermark: WatermarkKey | None = None

    def __repr__(self) -> str:
        """Name the parameters that are given, without the key of the watermark."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.watermark is not None:
            fields["watermark"] = "..."
        return f"Sampling({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def check_markable(sampling: Sampling) -> None:
    """Raise `BadRequestError` for a watermark where no token is left to chance; it names the value needed."""
    for name, is_fine, needed in (
        ("temperature", sampling.temperature >= LEAST_TEMPERATURE, f"at least {LEAST_TEMPERATURE:g}"),
        ("top_k", sampling.top_k != 1, "0 or at least 2"),
        ("top_p", sampling.top_p > 0.0, "above 0"),
        ("min_p", sampling.min_p < 1.0, "below 1"),
    ):
        if not is_fine:
            message = f"'{name}' is {getattr(sampling, name):g}, which leaves nothing to chance: answers to this key"
            message += f" carry a watermark, which is drawn by chance. Make it {needed}."
            raise BadRequestError(message, name, "watermark_needs_chance")


def with_advice(sampling: Sampling, left_out: Iterable[str], defaults: SamplingDefaults | None) -> Sampling:
    """Return how to sample where the parameters in `left_out` are as a model's files advise, as far as they do."""
    if defaults is None:
        return sampling
    advised = {name: value for name in left_out if (value := getattr(defaults, name)) is not None}
    return msgspec.structs.replace(sampling, **advised) if advised else sampling
