"""From logits to one token a row: penalties, temperature, truncation and a seeded draw, without a full sort."""

from kernels.sampling.dispatch import (
    apply_penalties,
    count_tokens,
    part_draw,
    part_highest,
    part_masses,
    sample_tokens,
    score_tokens,
)
from kernels.sampling.parameters import INVALID_TOKEN, PenaltyTable, SamplingParameters, TokenScores
from kernels.sampling.reference import marked_scores, token_uniforms, uniforms

__all__ = [
    "INVALID_TOKEN", "PenaltyTable", "SamplingParameters", "TokenScores", "apply_penalties", "count_tokens",
    "marked_scores", "part_draw", "part_highest", "part_masses", "sample_tokens", "score_tokens", "token_uniforms",
    "uniforms",
]  # fmt: skip
