"""The table of a step's arrays: from a plan to what the device reads, at its own size or padded to a captured one.

Everything that is done with the arrays of a step (laid out, padded, carried to the device) is done for each row of
`FIELDS`. A new array is a row there, an attribute of `StepArrays`, and in `step_context` what layers get of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.core.plan import StateWork, StepPlan
from gpu_worker.execution.batch.graph_shapes import GraphShape
from gpu_worker.execution.batch.placed_tokens import Frame, Placed
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from gpu_worker.execution.memory.kv_cache import KVCache, StatePool
from gpu_worker.layers.attention_context import AttentionContext, OwnTokens, ScoredTokens, WindowContext
from gpu_worker.layers.media_inputs import MediaInputs
from kernels.low_rank import AdapterRows
from kernels.paged_attention import ExpandedBlocks
from kernels.state_rows import StateRows, StateSaves

Array = TypeVar("Array")


class StepArrays(Struct, Generic[Array], frozen=True, gc=False):
    """The scheduled tokens of all sequences, end to end, on the host or on the device.

    Attributes:
        token_ids: `[num_tokens]`, `UNKNOWN_TOKEN` where only the device has it, as the last one of its row.
        token_rows: `[num_tokens]`, the row of each token's sequence.
        positions: `[num_tokens]`, in the sequence.
        slots: `[num_tokens]`, where each token's KV goes, -1 where another rank keeps it.
        query_starts: `[num_seqs + 1]`, first token of each sequence, then the number of tokens.
        context_lens: `[num_seqs]`, tokens of each sequence that have KV after the step.
        num_kept: `[num_seqs]`, tokens of each sequence that are not drafts; None where there are no drafts.
        state_slots: `[num_seqs]`, where states are; None in a model without recurrent layers.
        save_starts: `[num_seqs + 1]`, first copy of each sequence's state, then how many there are. None without any.
        save_tokens: `[num_saves]`, behind how many of the sequence's tokens.
        save_slots: `[num_saves]`, where they go.
        window_slots: Like `slots`, in each group of layers that keeps the last tokens.
    """

    token_ids: Array
    token_rows: Array
    positions: Array
    slots: Array
    rows: Array
    query_starts: Array
    context_lens: Array
    num_kept: Array | None = None
    state_slots: Array | None = None
    save_starts: Array | None = None
    save_tokens: Array | None = None
    save_slots: Array | None = None
    window_slots: tuple[Array, ...] = ()
    max_query_len: int = 1
    max_context_len: int = 0


HostStep = StepArrays[npt.NDArray[Any]]
DeviceStep = StepArrays[torch.Tensor]


class Field(Struct, frozen=True):
    """An array of a step.

    Attributes:
        size: How many there are: one a token, one a sequence, or one a sequence and one more, which says where the
            entries of each begin and the last ones end.
        fill: What padding has: a number, or the `spare_row` or `spare_slot`. Of an array of beginnings, how much each
            sequence of padding has.
        source: From where it comes; gives None where a step has none.
        shapes: The captured steps that have it: all, those that verify drafts, or those of models with states.
    """

    name: str
    dtype: type[np.generic]
    size: Literal["tokens", "sequences", "ends"]
    fill: int | Literal["spare_row", "spare_slot"]
    source: Callable[[Placed], npt.ArrayLike | None]
    shapes: Literal["all", "drafts", "states"] = "all"

    def nothing(self) -> npt.NDArray[Any]:
        """Return the array of no tokens and no sequences."""
        return np.zeros(int(self.size == "ends"), dtype=self.dtype)


_SLOTS = Field("slots", np.int64, "tokens", -1, Placed.slots)
FIELDS = (
    Field("token_ids", np.int64, "tokens", 0, Placed.token_ids),
    Field("token_rows", np.int64, "tokens", "spare_row", attrgetter("token_rows")),
    Field("positions", np.int64, "tokens", 0, Placed.positions),
    _SLOTS,
    Field("rows", np.int64, "sequences", "spare_row", attrgetter("rows")),
    Field("query_starts", np.int32, "ends", 1, attrgetter("query_starts")),
    Field("context_lens", np.int32, "sequences", 0, attrgetter("context_lens")),
    Field("num_kept", np.int32, "sequences", 0, lambda step: step.num_kept if step.drafts else None, "drafts"),
    Field("state_slots", np.int64, "sequences", "spare_slot", Placed.state_slots, "states"),
    Field("save_starts", np.int32, "ends", 0, lambda step: step.save_starts() if step.saves else None, "states"),
    # A copy is made behind a token, and behind none there are two: there are as many as tokens at most. How many there
    # are only `save_starts` tells; what stands behind the last is not read.
    Field("save_tokens", np.int32, "tokens", 0, lambda step: _save_column(step, 0), "states"),
    Field("save_slots", np.int64, "tokens", "spare_slot", lambda step: _save_column(step, 1), "states"),
)

# Those that every step has come first.
_ALWAYS = tuple(field for field in FIELDS if field.shapes == "all")

# From the arrays of `FIELDS`, in order, and the other attributes; and back.
_make: Callable[..., StepArrays[Any]] = StepArrays
_arrays_of: Callable[[StepArrays[Any]], tuple[Any, ...]] = attrgetter(*(field.name for field in FIELDS))


def lay_out(
    plan: StepPlan,
    sequences: Values[BatchSequence],
    frame: Frame,
    drafts: Values[Draft] | None = None,
    evicted: Int64s | None = None,
) -> HostStep:
    """Lay the scheduled tokens of all sequences end to end.

    Args:
        plan: Schedules at least one sequence.
        sequences: These sequences.
        frame: With tables whose rows cover the sequences' scheduled tokens.
        drafts: Of each sequence, to compute behind the scheduled tokens.
        evicted: Of each row, tokens that are not in the cache any more; None where no row has any.
    """
    placed = Placed(plan, sequences, drafts, frame, evicted)
    arrays = []
    for field in _ALWAYS if drafts is None and not frame.has_states else FIELDS:
        source = field.source(placed)
        arrays.append(np.array(source, dtype=field.dtype) if isinstance(source, list) else source)
    windows = tuple([placed.slots(tables) for tables in frame.windows]) if frame.windows else ()
    longest, max_context_len = placed.max_query_len, placed.max_context_len
    return _make(*arrays, window_slots=windows, max_query_len=longest, max_context_len=max_context_len)


def no_step(num_windows: int) -> HostStep:
    """Return a step without sequences, of which padding is all that there is."""
    arrays = [field.nothing() if field.shapes == "all" else None for field in FIELDS]
    return _make(*arrays, (np.zeros(0, dtype=np.int64),) * num_windows)


def padded(step: HostStep, shape: GraphShape, spare_row: int, spare_slot: int | None) -> HostStep:
    """Pad a step to the numbers of tokens and sequences of a shape, which it fits into.

    Each sequence of padding gets one token, as long as there are tokens; those after them get none. Where there are
    more tokens of padding than sequences, the last tokens belong to no sequence. Padding writes no KV, and attends to
    nothing.

    Args:
        step: At its own size.
        shape: Of the result.
        spare_row: The row of sequences that are only padding.
        spare_slot: Where the states of padding are; None in a model without recurrent layers.
    """
    spare = {"spare_row": spare_row, "spare_slot": 0 if spare_slot is None else spare_slot}
    is_there = {"all": True, "drafts": shape.has_drafts, "states": spare_slot is not None}
    arrays: list[npt.NDArray[Any] | None] = []
    for field, array in zip(FIELDS, _arrays_of(step), strict=True):
        if not is_there[field.shapes]:
            arrays.append(None)
            continue
        if array is None:
            array = np.diff(step.query_starts) if field.name == "num_kept" else field.nothing()
        fill = spare[field.fill] if isinstance(field.fill, str) else field.fill
        arrays.append(_padded(array, field, fill, shape))
    windows = tuple([_padded(slots, _SLOTS, -1, shape) for slots in step.window_slots])
    return _make(*arrays, windows, shape.query_len, step.max_context_len)


def _padded(array: npt.NDArray[Any], field: Field, fill: int, shape: GraphShape) -> npt.NDArray[Any]:
    if field.size == "ends":
        added = np.arange(1, shape.num_seqs + 2 - len(array)) * fill
        return np.concatenate((array, np.minimum(array[-1] + added, shape.num_tokens)), dtype=field.dtype)
    result = np.full(shape.num_tokens if field.size == "tokens" else shape.num_seqs, fill, dtype=field.dtype)
    result[: len(array)] = array
    return result


class StagedStep:
    """A step on its way to the device. Steps of equal size have their tensors at equal places of an upload."""

    def __init__(self, step: HostStep, upload: Upload) -> None:
        self._tensors: DeviceStep | None = None
        self._step = step
        arrays = _arrays_of(step)
        if not upload.is_copied:
            # The arrays themselves: fewer operations of the host than an upload has that copies nothing.
            share = torch.from_numpy
            tensors = [None if array is None else share(array) for array in arrays]
            self._tensors = self._device_step(tensors, map(share, step.window_slots))
            return
        staged: dict[int, StagedArray] = {}
        for array in (*arrays, *step.window_slots):
            # Where each sequence has one token, `token_rows` and `rows` may be the same array.
            if array is not None and id(array) not in staged:
                staged[id(array)] = upload.add(array)
        self._staged = [None if array is None else staged[id(array)] for array in arrays]
        self._windows = [staged[id(array)] for array in step.window_slots]

    @property
    def tensors(self) -> DeviceStep:
        """Return the tensors of an upload that was sent or bound."""
        if self._tensors is not None:
            return self._tensors
        tensors = [None if staged is None else staged.tensor for staged in self._staged]
        return self._device_step(tensors, [staged.tensor for staged in self._windows])

    def _device_step(self, tensors: list[torch.Tensor | None], windows: Iterable[torch.Tensor]) -> DeviceStep:
        return _make(*tensors, tuple(windows), self._step.max_query_len, self._step.max_context_len)


def step_context(
    step: DeviceStep,
    rows: BatchRows,
    cache: KVCache,
    states: StatePool | None,
    max_context_len: int,
    media: MediaInputs | None = None,
    adapters: AdapterRows | None = None,
    scored: ScoredTokens | None = None,
    num_expanded_blocks: int = 0,
    own: OwnTokens | None = None,
) -> AttentionContext:
    """Describe a step to the layers; `max_context_len` tokens of a sequence are in the cache at most.

    Keys and values are made of `num_expanded_blocks` blocks, which hold all contexts.
    """
    block_tables, state_rows, expanded = rows.whole.of(step.rows), None, None
    if num_expanded_blocks and own is None:
        expanded = ExpandedBlocks.of(block_tables, step.context_lens, cache.block_size, num_expanded_blocks)
    if states is not None:
        assert step.state_slots is not None, "the step was laid out without states"
        saves = None
        if step.save_starts is not None and step.save_tokens is not None and step.save_slots is not None:
            saves = StateSaves(step.save_starts, step.save_tokens, step.save_slots)
        starts, contexts, most = step.query_starts, step.context_lens, step.max_query_len
        state_rows = StateRows(step.state_slots, starts, contexts, most, step.num_kept, saves)
    return AttentionContext(
        caches=cache.layers,
        slot_mapping=step.slots,
        block_tables=block_tables,
        query_starts=step.query_starts,
        context_lens=step.context_lens,
        max_query_len=step.max_query_len,
        max_context_len=max_context_len,
        windows=[
            WindowContext(slots, tables.of(step.rows))
            for slots, tables in zip(step.window_slots, rows.windows, strict=True)
        ],
        group_of_layer=cache.layout.group_of_layer,
        states=() if states is None else states.layers,
        state_rows=state_rows,
        media=media,
        adapters=adapters,
        scored=scored,
        expanded=expanded,
        own=own,
    )


def copy_states(
    states: StatePool, sequences: Values[BatchSequence], works: Values[tuple[int, StateWork]], upload: Upload
) -> None:
    """Let sequences that start from a checkpoint get a copy of it when the upload arrives."""
    pairs = [
        (work.source, target)
        for work, target in ((work, sequences[place].state_slot) for place, work in works)
        if work.source is not None and target is not None and work.source != target
    ]
    if not pairs:
        return
    sources, targets = (upload.add(array) for array in np.array(pairs, dtype=np.int64).T)
    upload.on_arrival(lambda: states.copy(sources.tensor, targets.tensor))


def _save_column(step: Placed, column: int) -> list[int] | None:
    """Return a column of all copies of states, end to end; None where none is made."""
    return [pair[column] for _, saves in step.saves for pair in saves] if step.saves else None
