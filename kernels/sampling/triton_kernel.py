"""Sampling on a GPU: four launches for a batch that truncates, two for one that does not."""

from __future__ import annotations

import torch
import triton

from kernels.sampling.config import SamplingConfig
from kernels.sampling.parameters import PenaltyTable, SamplingParameters
from kernels.sampling.triton_draw import draw_kernel, tile_masses_kernel
from kernels.sampling.triton_penalties import count_tokens_kernel, penalties_kernel
from kernels.sampling.triton_statistics import tile_statistics_kernel
from kernels.sampling.triton_threshold import threshold_kernel

_PENALTY_BLOCK = 2048
_ALIGNED_FLOATS = 16


def sample_tokens_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: SamplingParameters,
    may_truncate: bool,
    config: SamplingConfig,
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
