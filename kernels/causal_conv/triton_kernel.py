# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The short convolution on a GPU: a program takes some channels of one sequence through some of its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.state_rows import StateRows
from kernels.triton_state_rows import RowPointers, sequence_of

# One access of 16 bytes a thread and token in 16 bits; reasoned, not measured.
_BLOCK_CHANNELS, _BLOCK_TOKENS, _NUM_WARPS = 128, 16, 4
# Tokens of a program: more than a state remembers, so that the program of the first tokens alone reads the state.
_TOKENS = 64


@triton.jit
def _inputs(x_ptr, state_ptr, places, columns, mask, x_stride, is_new, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Load inputs at `places`, counted from the step's first token of the sequence; those before lie in the state."""
    here = places >= 0
    x = tl.load(x_ptr + places * x_stride + columns, mask=mask & here, other=0.0).to(tl.float32)
    before = tl.load(
        state_ptr + (places + (WIDTH - 1)) * CHANNELS + columns,
        mask=mask & (places < 0) & (places > -WIDTH) & (is_new == 0),
        other=0.0,
    )
    return tl.where(here, x, before)


@triton.jit
def causal_conv_kernel(
    result_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    slots_ptr,
    starts_ptr,
    contexts_ptr,
    kept_ptr,
    save_starts_ptr,
    save_tokens_ptr,
    save_slots_ptr,
    x_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Convolve tokens of one sequence; `grid: (num_seqs, blocks of channels, runs of TOKENS tokens)`.

    The program of the first tokens stores the states: no other one reads them.
    """
    wait_for_inputs()
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    rows = RowPointers(slots_ptr, starts_ptr, contexts_ptr, kept_ptr, save_starts_ptr, save_tokens_ptr, save_slots_ptr)
    first, length, kept, is_new, is_padding = sequence_of(sequence, rows)
    state_ptr = states_ptr + tl.load(rows.slots + sequence) * ((WIDTH - 1) * CHANNELS)
    x_ptr += first * x_stride
    result_ptr += first * CHANNELS
    wide, tokens = columns[None, :], tl.arange(0, BLOCK_TOKENS)[:, None]
    first_place = tl.program_id(2) * TOKENS
    for start in range(first_place, tl.minimum(first_place + TOKENS, length), BLOCK_TOKENS):
        places = (start + tokens).to(tl.int64)
        mask = (places < length) & (wide < CHANNELS)
        total = tl.zeros((BLOCK_TOKENS, BLOCK_CHANNELS), dtype=tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + wide, mask=wide < CHANNELS, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            weight = tl.load(weight_ptr + tap * CHANNELS + wide, mask=wide < CHANNELS, other=0.0).to(tl.float32)
            x = _inputs(x_ptr, state_ptr, places - (WIDTH - 1) + tap, wide, mask, x_stride, is_new, CHANNELS, WIDTH)
            total += weight * x
        if HAS_SILU:
            # The exponential of -|total| cannot overflow.
            decay = tl.exp(-tl.abs(total))
            total = total * tl.where(total < 0, decay, 1.0) / (1.0 + decay)
        tl.store(result_ptr + places * CHANNELS + wide, total.to(result_ptr.dtype.element_ty), mask=mask)
    if first_place > 0:
        return
    # Other threads may still read the places written now.
    tl.debug_barrier()
    mask = columns < CHANNELS
    if rows.save_starts is not None:
        for save in range(tl.load(rows.save_starts + sequence), tl.load(rows.save_starts + sequence + 1)):
            copy_ptr = states_ptr + tl.load(rows.save_slots + save) * ((WIDTH - 1) * CHANNELS)
            behind = tl.load(rows.save_tokens + save)
            for age in tl.static_range(WIDTH - 1):
                place = (behind - (WIDTH - 1) + age).to(tl.int64)
                x = _inputs(x_ptr, state_ptr, place, columns, mask, x_stride, is_new, CHANNELS, WIDTH)
                tl.store(copy_ptr + age * CHANNELS + columns, x, mask=mask)
    for age in tl.static_range(WIDTH - 1):
        place = (kept - (WIDTH - 1) + age).to(tl.int64)
        x = _inputs(x_ptr, state_ptr, place, columns, mask, x_stride, is_new, CHANNELS, WIDTH)
        tl.store(state_ptr + age * CHANNELS + columns, x, mask=mask & (is_padding == 0))


def causal_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = True,
) -> torch.Tensor:
    """Compute what `kernels.causal_conv.causal_conv` promises."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, channels = weight.shape
    assert width <= _TOKENS
    grid = (len(rows.slots), triton.cdiv(channels, _BLOCK_CHANNELS), triton.cdiv(rows.max_query_len, _TOKENS))
    causal_conv_kernel[grid](
        result,
        x,
        weight,
        bias,
        states,
        *rows.tensors,
        x.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        HAS_SILU=has_silu,
        BLOCK_CHANNELS=_BLOCK_CHANNELS,
        TOKENS=_TOKENS,
        BLOCK_TOKENS=1 if rows.max_query_len == 1 else _BLOCK_TOKENS,
        num_warps=1 if rows.max_query_len == 1 else _NUM_WARPS,
        **dependent_launch(x.device),
    )
    return result
