"""The rotary frequencies of one model: plain, or scaled to reach beyond the length that it was trained on."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum

import torch


class RopeType(Enum):
    """How the frequencies are scaled; the values are those of `rope_type` in a checkpoint's configuration."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Everything that determines the rotary frequencies.

    Attributes:
        theta: Base of the geometric series of wavelengths.
        factor: How many times longer than `original_max_len` the model is to reach.
        original_max_len: Length in tokens that the model was trained on, before scaling.
        low_freq_factor: llama3: wavelengths above `original_max_len / low_freq_factor` are scaled in full.
        high_freq_factor: llama3: wavelengths below `original_max_len / high_freq_factor` are not scaled.
        attention_factor: yarn, longrope: multiplies cos and sin; None derives it from `factor`.
        long_attention_factor: longrope: the same where sequences may be longer than `original_max_len`, if it differs.
        beta_fast: yarn: dimensions that turn more often than this within `original_max_len` are not scaled.
        beta_slow: yarn: dimensions that turn less often than this are scaled in full.
        mscale: yarn: with `mscale_all_dim`, replaces the derivation of `attention_factor`; None when absent.
        truncate: yarn: round the bounds of the ramp to whole dimensions.
        divisors: default: what each frequency is divided by; empty is nothing. longrope: the same where no sequence is
            longer than `original_max_len`.
        long_divisors: longrope: the same where sequences may be longer.
        turning_share: proportional: of a head's pairs, the share that turns, the first ones.
    """

    rope_type: RopeType
    theta: float
    original_max_len: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    long_attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    turning_share: float = 1.0


def for_length(parameters: RopeParameters, max_len: int) -> RopeParameters:
    """Return the parameters of a model that serves `max_len` positions, which hold for any part of them."""
    if not parameters.long_divisors:
        return parameters
    is_long = max_len > parameters.original_max_len
    divisors = parameters.long_divisors if is_long else parameters.divisors
    amplitude = parameters.attention_factor
    if is_long and parameters.long_attention_factor is not None:
        amplitude = parameters.long_attention_factor
    return dataclasses.replace(parameters, divisors=divisors, long_divisors=(), attention_factor=amplitude)


def note_on_length(parameters: RopeParameters, max_len: int) -> str | None:
    """Return what serving `max_len` positions costs texts of the length that the model was trained on, if anything."""
    trained = parameters.original_max_len
    if max_len <= trained:
        return None
    if parameters.rope_type is RopeType.LONGROPE and parameters.long_divisors != parameters.divisors:
        return (
            f"sequences may have {max_len} tokens, so the long factors of LongRoPE turn short texts too, which are "
            f"answered less well; where {trained} tokens are enough, start with --max-model-len {trained}"
        )
    if parameters.rope_type is RopeType.DYNAMIC:
        return (
            f"sequences may have {max_len} tokens; beyond {trained} each token turns by its own position (dynamic NTK) "
            f"and not by its prompt's length, as in transformers; --max-model-len {trained} serves no longer ones"
        )
    return None


def rope_angles(parameters: RopeParameters, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Compute the angle of each pair of dimensions at each position, in float32.

    Dynamic scaling depends on the length of the sequence. Keys stay in the cache as they were written, and a token's
    key must not depend on how its prompt was cut into chunks, batched, or found in the prefix cache. So a token at
    position `p` gets the frequencies of a sequence of length `p + 1`: those under which `transformers` generates it.
    (Its one-shot prefill of a prompt longer than `original_max_len` uses the prompt's whole length for all tokens.)

    LongRoPE has two sets of frequencies. For the same reason, one of them holds for all tokens: that of long sequences
    when `positions`, which are those of the longest sequence that is served, go beyond `original_max_len`.
    (`transformers` chooses by the length of each batch, and recomputes a sequence that grows beyond it.)

    Shapes:
        positions: `[num_positions]`
        result: `[num_positions, head_dim / 2]`
    """
    positions = positions.float()[:, None]
    if parameters.rope_type is RopeType.DYNAMIC:
        return positions * _dynamic_frequencies(parameters, head_dim, positions + 1)
    frequencies = _default_frequencies(parameters.theta, head_dim)
    if parameters.rope_type is RopeType.PROPORTIONAL:
        frequencies[int(parameters.turning_share * head_dim // 2) :] = 0
    if divisors := _divisors(parameters, positions):
        frequencies = frequencies / torch.tensor(divisors)
    if parameters.rope_type is RopeType.LINEAR:
        frequencies = frequencies / parameters.factor
    elif parameters.rope_type is RopeType.LLAMA3:
        frequencies = _llama3_frequencies(parameters, frequencies)
    elif parameters.rope_type is RopeType.YARN:
        frequencies = _yarn_frequencies(parameters, head_dim)
    return positions * frequencies


def rope_amplitude(parameters: RopeParameters) -> float:
    """Return the factor by which cos and sin are multiplied: one, except for YaRN and LongRoPE.

    Source: arXiv 2309.00071, equation 22; arXiv 2402.13753, as the authors of Phi-3 have it.
    """
    if parameters.rope_type not in (RopeType.YARN, RopeType.LONGROPE):
        return 1.0
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.rope_type is RopeType.LONGROPE:
        growth = math.log(max(parameters.factor, 1.0)) / math.log(parameters.original_max_len)
        return math.sqrt(1 + growth)
    if parameters.mscale and parameters.mscale_all_dim:
        return _mscale(parameters.factor, parameters.mscale) / _mscale(parameters.factor, parameters.mscale_all_dim)
    return _mscale(parameters.factor, 1.0)


def score_scale(parameters: RopeParameters) -> float:
    """Return what scores of DeepSeek's attention are multiplied by besides: one, except where YaRN says otherwise.

    Source: DeepSeek-V2's modelling code, which takes the amplitude that cos and sin do not get.
    """
    if parameters.rope_type is RopeType.DEFAULT or not parameters.mscale_all_dim:
        return 1.0
    return _mscale(parameters.factor, parameters.mscale_all_dim) ** 2


def _divisors(parameters: RopeParameters, positions: torch.Tensor) -> tuple[float, ...]:
    is_long = parameters.long_divisors and bool((positions >= parameters.original_max_len).any())
    return parameters.long_divisors if is_long else parameters.divisors


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _default_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** _exponents(head_dim)


def _dynamic_frequencies(parameters: RopeParameters, head_dim: int, lengths: torch.Tensor) -> torch.Tensor:
    stretch = lengths.double().clamp(min=parameters.original_max_len) / parameters.original_max_len
    growth = (parameters.factor * stretch - (parameters.factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / (parameters.theta * growth).float() ** _exponents(head_dim)


def _llama3_frequencies(parameters: RopeParameters, frequencies: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    turns = parameters.original_max_len / wavelengths
    # Llama 4 has both bounds at one, so that nothing is interpolated.
    kept = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).float()
    return (1 - kept) * frequencies / parameters.factor + kept * frequencies


def _yarn_frequencies(parameters: RopeParameters, head_dim: int) -> torch.Tensor:
    """Source: arXiv 2309.00071, section 3.2; the ramp runs over dimensions, as in the authors' code."""

    def dimension_turning(turns: float) -> float:
        ratio = math.log(parameters.original_max_len / (turns * 2 * math.pi))
        return head_dim * ratio / (2 * math.log(parameters.theta))

    low, high = dimension_turning(parameters.beta_fast), dimension_turning(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    scaled = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = _default_frequencies(parameters.theta, head_dim)
    return frequencies / parameters.factor * scaled + frequencies * (1 - scaled)
