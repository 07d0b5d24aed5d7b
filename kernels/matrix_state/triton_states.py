# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the Triton kernels of all rules do: begin with a state, fade it over a chunk, and store it where it is wanted.

A program takes some columns of a head's state through a sequence: `grid: (num_seqs * HEADS, blocks of columns)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_state_rows import next_save_of, saves_of, sequence_of


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), through exp(-|x|), which cannot overflow. Where that is tiny, so is the error."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


class Home(NamedTuple):
    """Where a program's part of the state is kept.

    Attributes:
        places: Pointers to its elements in the sequence's slot.
        is_written: Which of them are written.
        slot: That slot.
        kept: Behind how many tokens of the step it is stored there.
        slot_size: Elements of a slot.
    """

    places: Any
    is_written: Any
    slot: Any
    kept: Any
    slot_size: Any


@triton.jit
def open_state(
    states_ptr,
    rows,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Return what a program begins with; `rows` are `RowPointers`.

    Returns:
        Its head; the numbers of its rows and columns; the sequence's first token, and how many it has; the state; and
        for `keep_state` its `Home`, and its copies (number of the next, of what follows the last, behind how many
        tokens the next is made).
    """
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first, length, kept, is_new, is_padding = sequence_of(sequence, rows)
    keys = tl.arange(0, BLOCK_KEY)
    columns = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    slot = tl.load(rows.slots + sequence)
    places = states_ptr + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + columns[None, :]
    mask = (keys < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    state = tl.load(places, mask=mask & (is_new == 0), other=0.0)
    is_written = mask & (is_padding == 0)
    if kept == 0:
        tl.store(places, state, mask=is_written)
    home = Home(places, is_written, slot, kept, HEADS * KEY_DIM * VALUE_DIM)
    return head, keys, columns, first, length, state, home, saves_of(sequence, length, rows)


@triton.jit
def keep_state(state, count, length, home, saves, rows):
    """Store the state behind `count` tokens of `length` where it is kept or copied, and return what copies are left."""
    save, last_save, next_save = saves
    if count == home.kept:
        tl.store(home.places, state, mask=home.is_written)
    if rows.save_slots is not None:  # noqa: SIM102 (decided at compile time, unlike what follows)
        if (count == next_save) & (save < last_save):
            offset = (tl.load(rows.save_slots + save) - home.slot) * home.slot_size
            tl.store(home.places + offset, state, mask=home.is_written)
            save += 1
            next_save = next_save_of(save, last_save, length, rows)
    return save, last_save, next_save


@triton.jit
def chunk_end(start, length, home, saves, rows, CHUNK: tl.constexpr):
    """Return where the chunk ends that begins at token `start`: at the latest where the state is kept or copied."""
    end = tl.minimum(tl.minimum(start + CHUNK, length), tl.where(home.kept > start, home.kept, length))
    if rows.save_slots is not None:
        end = tl.minimum(end, saves[2])
    return end


@triton.jit
def fading_of(log_decay, rows):
    """Return what `fading.Fading` has: the logarithms of `since_start`, and `between`."""
    total = tl.cumsum(log_decay, 0)
    is_past = rows[:, None] >= rows[None, :]
    return total, tl.where(is_past, tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def read_chunk(state, query, key, added, total, between, PRECISION: tl.constexpr):
    """Return what the tokens of a chunk read of the state before it, and of what they add to it."""
    read = tl.exp(total)[:, None] * tl.dot(query, state, input_precision=PRECISION)
    seen = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
    return read + tl.dot(seen, added, input_precision=PRECISION)


@triton.jit
def add_chunk(state, key, added, log_decay, total, PRECISION: tl.constexpr):
    """Return the state behind a chunk."""
    whole = tl.sum(log_decay, 0)
    fading = key * tl.exp(whole - total)[:, None]
    return state * tl.exp(whole) + tl.dot(tl.trans(fading), added, input_precision=PRECISION)
