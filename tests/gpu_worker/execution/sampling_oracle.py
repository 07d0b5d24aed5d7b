"""The sampler's semantics once more, one row and one token at a time, in plain Python."""

from __future__ import annotations

import math

from shared.sampling import Sampling


def adjusted_logits(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Apply bias and penalties."""
    result = []
    for token_id, logit in enumerate(logits):
        logit += sampling.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.frequency_penalty * output.count(token_id)
        logit -= sampling.presence_penalty * (token_id in output)
        result.append(logit)
    return result


def distribution(logits: list[float], sampling: Sampling) -> list[float]:
    """Probability of each token."""
    if sampling.temperature == 0:
        return [float(logit == max(logits)) for logit in logits]
    probabilities = _normalised([math.exp((logit - max(logits)) / sampling.temperature) for logit in logits])
    least = sampling.min_p * max(probabilities)
    probabilities = _normalised([p if p >= least else 0.0 for p in probabilities])
    if sampling.top_k > 0:
        least = sorted(probabilities, reverse=True)[: sampling.top_k][-1]
        probabilities = _normalised([p if p >= least else 0.0 for p in probabilities])
    kept, before = set(), 0.0
    for token_id in sorted(range(len(logits)), key=lambda t: -probabilities[t]):
        if before < sampling.top_p or not kept:
            kept.add(token_id)
        before += probabilities[token_id]
    return _normalised([p if token_id in kept else 0.0 for token_id, p in enumerate(probabilities)])


def _normalised(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def forbidden_tokens(
    sampling: Sampling, output: list[int], end_ids: set[int], bad_words: list[tuple[int, ...]], vocab_size: int
) -> set[int]:
    """Return the tokens that may not follow an output."""
    forbidden: set[int] = set()
    if sampling.allowed_token_ids is not None:
        forbidden |= set(range(vocab_size)) - set(sampling.allowed_token_ids)
    for word in bad_words:
        if [*word[:-1]] == output[len(output) - len(word) + 1 :] or len(word) == 1:
            forbidden.add(word[-1])
    if len(output) < sampling.min_tokens and forbidden | end_ids != set(range(vocab_size)):
        forbidden |= end_ids
    return forbidden
