"""Sampling in plain torch, by a full sort and in float64: the oracle of the kernels, and what runs without a GPU."""

from __future__ import annotations

import torch

from kernels.sampling.parameters import INVALID_TOKEN, PenaltyTable, SamplingParameters, TokenScores


def token_uniforms(marks: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the uniform number in (0, 1), with 32 random bits, of each token under a mark, float64.

    Four tokens share a counter: token `t` has word `t % 4` of counter `t // 4`.

    Shapes:
        marks, token_ids, result: the same, int64
    """
    first, second, third, fourth = philox(marks, token_ids >> 2)
    lane = token_ids & 3
    word = torch.where(lane < 2, torch.where(lane == 0, first, second), torch.where(lane == 2, third, fourth))
    return (word.double() + 0.5) * 2.0**-32


def marked_scores(scaled: torch.Tensor, least: torch.Tensor, marks: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return what decides which token a watermarked row draws: the highest score, the first of several.

    A score is a scaled logit plus the token's Gumbel noise `-log(-log(u))`: over many marks a token is drawn as often
    as the softmax says.

    Args:
        scaled: Logits less the highest of the row, times the inverse temperature.
        least: The smallest of these that each row keeps.
        marks: Of each row.
        first: The token of the first column.

    Shapes:
        scaled, result: `[num_rows, num_columns]`; the result is float64
        least, marks: `[num_rows]`
    """
    token_ids = torch.arange(first, first + scaled.shape[1], device=scaled.device).expand(scaled.shape)
    noise = -torch.log(-torch.log(token_uniforms(marks[:, None].expand(scaled.shape), token_ids)))
    scores = scaled.double() + noise
    return scores.masked_fill_(scaled < least[:, None], -torch.inf)


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(key: torch.Tensor, counter: torch.Tensor) -> Words:
    """Return four random words of 32 bits, as int64, for each key and counter, both int64 and of one shape.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32 with 10 rounds; low words
    first, the upper half of the counter is 0.
    """
    c0, c1 = counter & _MASK, counter >> 32 & _MASK
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = key & _MASK, key >> 32 & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _product(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of a product; torch has signed 64-bit integers only, so half a word at a time."""
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def sample_tokens_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: SamplingParameters,
    *,
    may_truncate: bool = True,
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `kernels.sampling.sample_tokens` promises; `may_truncate` changes nothing here."""
    inverse_temperature = parameters.inverse_temperature[slots]
    is_greedy = inverse_temperature == 0
    highest = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - highest) * torch.where(is_greedy, 1.0, inverse_temperature)[:, None]
    weights = scaled.double().exp()
    is_valid = weights.sum(1).isfinite()
    least = torch.full_like(highest, float("-inf"))
    if may_truncate:
        least = _least(scaled, weights, slots, parameters)
        weights.masked_fill_(scaled < least, 0.0)
    uniform = uniforms(parameters.seed[slots], positions)
    cumulative = weights.cumsum(1)
    target = (uniform * cumulative[:, -1])[:, None]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    if marks is not None:
        rows = marks.nonzero()[:, 0]
        drawn[rows] = marked_scores(scaled[rows], least[rows, 0], marks[rows]).argmax(dim=1)
    return torch.where(is_greedy, logits.argmax(dim=-1), drawn).masked_fill_(~is_valid, INVALID_TOKEN)


def _least(
    scaled: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, parameters: SamplingParameters
) -> torch.Tensor:
    """Return the smallest scaled logit that each row keeps, `[num_rows, 1]`."""
    vocab_size = scaled.shape[1]
    ordered, order = scaled.sort(dim=1, descending=True)
    top_k = parameters.top_k[slots][:, None].long()
    kth = ordered.gather(1, top_k.clamp(1, vocab_size) - 1)
    log_min_p = parameters.log_min_p[slots][:, None].nan_to_num(nan=float("-inf"), neginf=float("-inf")).clamp(max=0.0)
    least = torch.where(top_k > 0, kth, float("-inf")).maximum(log_min_p)
    survivors = weights.gather(1, order).masked_fill_(ordered < least, 0.0)
    cumulative = survivors.cumsum(1)
    top_p = parameters.top_p[slots][:, None]
    is_enough = cumulative >= top_p.double() * cumulative[:, -1:]
    nucleus = ordered.gather(1, is_enough.int().argmax(dim=1, keepdim=True))
    return least.maximum(torch.where(top_p < 1.0, nucleus, float("-inf")))


def apply_penalties_reference(
    logits: torch.Tensor, slots: torch.Tensor, penalties: PenaltyTable, drafts: torch.Tensor | None = None
) -> None:
    """Penalise logits in place: repetition first, then frequency, then presence."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    is_seen = (penalties.seen_bits[slots][:, token_ids // 32] >> (token_ids % 32)) & 1 > 0
    counts = torch.where(is_seen, penalties.output_counts[slots], 0)
    if drafts is not None:
        rows = torch.arange(len(slots), device=logits.device)[:, None].expand_as(drafts)
        counts.index_put_((rows, drafts.clamp(min=0)), (drafts >= 0).to(torch.int32), accumulate=True)
    repetition, frequency, presence = (
        values[slots][:, None] for values in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = repeated - frequency * counts - presence * (counts > 0)
    logits.copy_(torch.where(is_seen | (counts > 0), penalised, logits))


def count_tokens_reference(penalties: PenaltyTable, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Do what `kernels.sampling.count_tokens` promises."""
    is_token = token_ids >= 0
    token_ids = token_ids.clamp(min=0)
    penalties.output_counts.index_put_((slots, token_ids), is_token.to(torch.int32), accumulate=True)
    # Tokens may share a word, which is made from the counts, so that all of them write the same.
    bits = torch.arange(32, dtype=torch.int32, device=token_ids.device)
    words = token_ids // 32
    ids = words[:, None] * 32 + bits
    vocab_size = penalties.output_counts.shape[1]
    occurs = (penalties.output_counts[slots[:, None], ids.clamp(max=vocab_size - 1)] > 0) & (ids < vocab_size)
    values = (occurs.to(torch.int32) << bits).sum(1, dtype=torch.int32)
    penalties.seen_bits.index_put_((slots, words), penalties.seen_bits[slots, words] | values)


def score_tokens_reference(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenScores:
    """Do what `kernels.sampling.score_tokens` promises."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(1, token_ids[:, None])[:, 0]
    top_values, top_ids = values.topk(min(num_top, values.shape[1]))
    return TokenScores(chosen, top_ids, top_values)


def uniforms(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return one uniform number in [0, 1) with 53 random bits for each (seed, position), float64."""
    first, second, _, _ = philox(seed, position)
    return ((first >> 5) << 26 | second >> 6).double() * 2.0**-53
