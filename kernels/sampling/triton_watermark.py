# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The draw of watermarked rows: the best token of each group of tiles, then the best of these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling.config import SamplingConfig
from kernels.sampling.parameters import SamplingParameters
from kernels.sampling.triton_draw import KEEP_ALL


@triton.jit
def marked_draw_kernel(
    logits,
    row_stride,
    slots,
    inverse_temperatures,
    marks,
    maxima,
    thresholds,
    scores,
    token_ids,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    MAY_TRUNCATE: tl.constexpr,
):
    """Program (row, group) writes the highest score in `TILES` tiles and its token, where the row has a mark."""
    row = tl.program_id(0).to(tl.int64)
    mark = tl.load(marks + row)
    if mark != 0:
        all_tiles = tl.arange(0, ALL_TILES)
        row_maxima = tl.load(maxima + row * num_tiles + all_tiles, mask=all_tiles < num_tiles, other=float("-inf"))
        highest = tl.max(row_maxima, axis=0)
        inverse_temperature = tl.load(inverse_temperatures + tl.load(slots + row))
        inverse_temperature = tl.where(inverse_temperature == 0.0, 1.0, inverse_temperature)
        threshold = KEEP_ALL
        if MAY_TRUNCATE:
            threshold = tl.load(thresholds + row)
        ids = tl.program_id(1) * TILES * TILE + tl.arange(0, TILES * TILE)
        is_token = ids < vocab_size
        values = tl.load(logits + row * row_stride + ids, mask=is_token, other=float("-inf"))
        distances = (highest - values) * inverse_temperature
        is_kept = is_token & (distances.to(tl.int32, bitcast=True) <= threshold)
        counter = (ids >> 2).to(tl.uint32)
        zero = counter ^ counter
        first, second, third, fourth = tl.philox(mark, counter, zero, zero, zero)
        lane = ids & 3
        word = tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))
        uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
        score = tl.where(is_kept, -distances.to(tl.float64) - tl.log(-tl.log(uniform)), float("-inf"))
        best = tl.max(score, axis=0)
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(scores + place, best)
        tl.store(token_ids + place, tl.min(tl.where(score == best, ids, vocab_size), axis=0).to(tl.int64))


def draw_marked(
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    slots: torch.Tensor,
    parameters: SamplingParameters,
    marks: torch.Tensor,
    maxima: torch.Tensor,
    thresholds: torch.Tensor,
    *,
    may_truncate: bool,
    config: SamplingConfig,
) -> None:
    """Replace the tokens, drawn without marks, of rows that have a mark and draw from a distribution.

    `maxima` are of each tile, `thresholds` of each row if any is truncated; the rest is as for `sample_tokens`.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, config.tile)
    groups = (num_rows, triton.cdiv(num_tiles, config.tiles))
    scores = torch.empty(groups, dtype=torch.float64, device=logits.device)
    columns = torch.empty(groups, dtype=torch.int64, device=logits.device)
    marked_draw_kernel[groups](
        logits, logits.stride(0), slots, parameters.inverse_temperature, marks, maxima, thresholds, scores, columns,
        vocab_size, num_tiles, TILE=config.tile, TILES=config.tiles, ALL_TILES=triton.next_power_of_2(num_tiles),
        MAY_TRUNCATE=may_truncate, num_warps=config.statistics_warps,
    )  # fmt: skip
    is_marked = (marks != 0) & (token_ids >= 0) & (parameters.inverse_temperature[slots] != 0)
    # The first of several: groups are in the order of tokens.
    drawn = columns.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    token_ids.copy_(torch.where(is_marked, drawn, token_ids))
