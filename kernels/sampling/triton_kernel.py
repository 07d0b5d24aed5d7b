"""Sampling on a GPU: four launches for a batch that truncates, two for one that does not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling.config import SamplingConfig
from kernels.sampling.parameters import PenaltyTable, SamplingParameters
from kernels.sampling.triton_draw import draw_kernel, draw_marked, tile_masses_kernel
from kernels.sampling.triton_threshold import threshold_kernel

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators


@triton.jit(do_not_specialize=["num_drafts"])
def penalties_kernel(
    logits,
    row_stride,
    slots,
    repetitions,
    frequencies,
    presences,
    output_counts,
    seen_bits,
    drafts,
    num_drafts,
    vocab_size,
    num_words,
    BLOCK: tl.constexpr,
):
    """Program (row, block) penalises `BLOCK` tokens. Rounds as torch does: compile without contraction to fma."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    repetition = tl.load(repetitions + slot)
    frequency = tl.load(frequencies + slot)
    presence = tl.load(presences + slot)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_token = ids < vocab_size
        words = tl.load(seen_bits + slot * num_words + ids // 32, mask=is_token, other=0)
        is_seen = ((words >> (ids % 32)) & 1) != 0
        counts = tl.load(output_counts + slot * vocab_size + ids, mask=is_token & is_seen, other=0)
        for draft in range(num_drafts):
            counts += (tl.load(drafts + row * num_drafts + draft) == ids).to(tl.int32)
        is_penalised = is_token & (is_seen | (counts > 0))
        places = logits + row * row_stride + ids
        values = tl.load(places, mask=is_penalised, other=0.0)
        values = tl.where(values > 0.0, tl.math.div_rn(values, repetition), values * repetition)
        values -= frequency * counts.to(tl.float32)
        values -= presence * (counts > 0).to(tl.float32)
        tl.store(places, values, mask=is_penalised)


@triton.jit
def count_tokens_kernel(output_counts, seen_bits, slots, token_ids, vocab_size, num_words):
    """Program `i` adds a token to a slot's output, unless it is negative."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + place).to(tl.int64)
    token_id = tl.load(token_ids + place)
    is_token = token_id >= 0
    tl.atomic_add(output_counts + slot * vocab_size + token_id, 1, mask=is_token, sem="relaxed")
    bit = (token_id * 0 + 1).to(tl.int32) << (token_id % 32).to(tl.int32)
    tl.atomic_or(seen_bits + slot * num_words + token_id // 32, bit, mask=is_token, sem="relaxed")


# The first read of the logits: everything later is decided from these few numbers of a tile, and reads only the tiles
# that matter. A weight is the exponential of a logit's distance to a maximum, here that of its own tile, times the
# inverse temperature.
@triton.jit
def tile_statistics_kernel(
    logits,
    row_stride,
    slots,
    inverse_temperatures,
    maxima,
    minima,
    sums,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (row, group) reads `TILES` tiles. `minima` leaves out minus infinity; a NaN shows in `sums`."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inverse_temperature = tl.load(inverse_temperatures + tl.load(slots + row))
    inverse_temperature = tl.where(inverse_temperature == 0.0, 1.0, inverse_temperature)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    maximum = tl.max(values, axis=1)
    minimum = tl.min(tl.where(values == float("-inf"), float("inf"), values), axis=1)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp((values - base[:, None]) * inverse_temperature), axis=1)
    places = row * num_tiles + tiles
    is_tile = tiles < num_tiles
    tl.store(maxima + places, maximum, mask=is_tile)
    tl.store(minima + places, minimum, mask=is_tile)
    tl.store(sums + places, total, mask=is_tile)


_PENALTY_BLOCK = 2048
_ALIGNED_FLOATS = 16


def sample_tokens_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: SamplingParameters,
    may_truncate: bool,
    config: SamplingConfig,
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `kernels.sampling.sample_tokens` promises, with launches of the shapes in `config`."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token_ids
    num_tiles = triton.cdiv(vocab_size, config.tile)
    all_tiles = triton.next_power_of_2(num_tiles)
    # Kernels are compiled anew for a pointer that is aligned otherwise: all four parts begin alike.
    num_places = triton.cdiv(num_rows * num_tiles, _ALIGNED_FLOATS) * _ALIGNED_FLOATS
    maxima, minima, sums, masses = torch.empty((4, num_places), device=logits.device)
    groups = (num_rows, triton.cdiv(num_tiles, config.tiles))
    tile_statistics_kernel[groups](
        logits, logits.stride(0), slots, parameters.inverse_temperature, maxima, minima, sums, vocab_size, num_tiles,
        TILE=config.tile, TILES=config.tiles, num_warps=config.statistics_warps,
    )  # fmt: skip
    thresholds = torch.empty(num_rows if may_truncate else 0, dtype=torch.int32, device=logits.device)
    if may_truncate:
        lists = torch.empty((num_rows, config.capacity), dtype=torch.int32, device=logits.device)
        threshold_kernel[(num_rows,)](
            logits, logits.stride(0), slots, parameters.inverse_temperature, parameters.log_min_p, parameters.top_k,
            parameters.top_p, maxima, minima, sums, lists, thresholds, vocab_size, num_tiles,
            TILE=config.tile, ALL_TILES=all_tiles, ROWS=config.threshold_rows, TILES=config.threshold_tiles,
            PIVOTS=config.pivots, STAGES=config.stages, CAPACITY=config.capacity, num_warps=config.threshold_warps,
        )  # fmt: skip
        tile_masses_kernel[groups](
            logits, logits.stride(0), slots, parameters.inverse_temperature, maxima, sums, thresholds, masses,
            vocab_size, num_tiles,
            TILE=config.tile, TILES=config.tiles, ALL_TILES=all_tiles, num_warps=config.statistics_warps,
        )  # fmt: skip
    draw_kernel[(num_rows,)](
        logits, logits.stride(0), slots, parameters.inverse_temperature, parameters.seed, positions,
        maxima, sums, thresholds, masses, token_ids, vocab_size, num_tiles,
        TILE=config.tile, ALL_TILES=all_tiles, MAY_TRUNCATE=may_truncate,
        num_warps=config.draw_warps,
    )  # fmt: skip
    if marks is not None:
        given = (logits, slots, parameters, marks, maxima, thresholds)
        draw_marked(token_ids, *given, may_truncate=may_truncate, config=config)
    return token_ids


def apply_penalties_triton(
    logits: torch.Tensor, slots: torch.Tensor, penalties: PenaltyTable, drafts: torch.Tensor | None
) -> None:
    """Penalise logits in place."""
    num_rows, vocab_size = logits.shape
    penalties_kernel[(num_rows, triton.cdiv(vocab_size, _PENALTY_BLOCK))](
        logits, logits.stride(0), slots, penalties.repetition, penalties.frequency, penalties.presence,
        penalties.output_counts, penalties.seen_bits, slots if drafts is None else drafts,
        0 if drafts is None else drafts.shape[1], vocab_size, penalties.seen_bits.shape[1],
        BLOCK=_PENALTY_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def count_tokens_triton(penalties: PenaltyTable, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Do what `kernels.sampling.count_tokens` promises."""
    if len(token_ids):
        count_tokens_kernel[(len(token_ids),)](
            penalties.output_counts, penalties.seen_bits, slots, token_ids, penalties.output_counts.shape[1],
            penalties.seen_bits.shape[1], num_warps=1,
        )  # fmt: skip
