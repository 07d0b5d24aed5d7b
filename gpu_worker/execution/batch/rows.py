"""State of each row of the batch: block tables, here and on the device, and the sampler's state.

The scheduler assigns rows. A sequence keeps its row while it is in the batch, so that its state on the device need not
move. One more row, the spare one, belongs to padding: its block table is never read.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.plan import StepPlan, Written
from gpu_worker.execution.batch.transfers import DTYPES, Int32s, Int64s, Upload
from gpu_worker.layers.adapters import AdapterTargets
from kernels.low_rank import AdapterRows

NEVER = np.iinfo(np.int64).max


class BlockTables:
    """The tables of all rows.

    Attributes:
        host: `[num_rows, width]`, as this side knows them.
        device: The same on the device; on a CPU the same memory.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.host: Int32s = np.zeros((num_rows, width), dtype=np.int32)
        self._is_shared = device.type == "cpu"
        self.device = torch.from_numpy(self.host)
        if not self._is_shared:
            self.device = torch.zeros(num_rows, width, dtype=torch.int32, device=device)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block tables of these rows, on the device.

        Shapes:
            rows: `[num_seqs]` int64, on the device
            result: `[num_seqs, width]` int32, contiguous
        """
        if self._is_shared:
            # A third of what torch takes.
            return torch.from_numpy(self.host[rows.numpy()])
        return self.device.index_select(0, rows)

    def write(self, written: Values[Written], upload: Upload) -> None:
        """Write the blocks added to the tables of sequences into their rows."""
        width = self.host.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for item in written:
            first = item.row * width + item.first
            places += range(first, first + len(item.ids))
            blocks += item.ids
        self.host.reshape(-1)[places] = blocks
        if self._is_shared:
            return
        staged_places = upload.add(np.array(places, dtype=np.int64))
        staged_blocks = upload.add(np.array(blocks, dtype=np.int32))
        flat = self.device.view(-1)
        upload.on_arrival(lambda: flat.index_copy_(0, staged_places.tensor, staged_blocks.tensor))


class BatchRows:
    """The rows.

    Attributes:
        whole: Block tables of the layers that keep all tokens.
        windows: Those of the groups of layers that keep the last tokens.
        prompt_lens: `[max_num_seqs + 1]`, prompt tokens of each row's sequence, less those that were evicted: the place
            in the cache, which may be before its beginning, from which output counts.
        parts: `[max_num_seqs + 1]`, the part of the blocks that each row's sequence belongs to.
        evicted: `[max_num_seqs + 1]`, tokens of each row's sequence that are not in the cache any more.
        scored_from: `[max_num_seqs + 1]`, place in the cache from which tokens are asked how they attend, or `NEVER`.
        adapters: `[max_num_seqs + 1]`, the slot of each row's adapter; below zero without.
        has_adapters: Whether any row has one.
        has_evicted: Whether any row's sequence has evicted tokens.
        has_scored: Whether tokens of any row are asked how they attend.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device, num_windows: int = 0) -> None:
        self.spare = max_num_seqs
        self.whole = BlockTables(max_num_seqs + 1, width, device)
        self.windows = [BlockTables(max_num_seqs + 1, width, device) for _ in range(num_windows)]
        self.prompt_lens: Int64s = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self.parts: Int64s = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self.evicted: Int64s = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self.has_evicted = self.has_scored = False
        self.scored_from: Int64s = np.full(max_num_seqs + 1, NEVER, dtype=np.int64)
        self.adapters: Int32s = np.full(max_num_seqs + 1, -1, dtype=np.int32)
        self.has_adapters = False

    @property
    def num_rows(self) -> int:
        """Rows, the spare one included."""
        return len(self.prompt_lens)

    def adapted(self, token_rows: Int64s, targets: AdapterTargets) -> AdapterRows | None:
        """Return which tokens of a step, of these rows, have one of the adapters; None where none has."""
        slots = self.adapters[token_rows]
        return targets.rows(slots) if slots.max() >= 0 else None

    def follow(self, plan: StepPlan, upload: Upload) -> None:
        """Bring block tables up to date with a plan."""
        if plan.departed and self.has_adapters:
            self.adapters[plan.departed] = -1
        if plan.departed and self.has_scored:
            self.scored_from[plan.departed] = NEVER
        for item in plan.new:
            self.scored_from[item.row] = NEVER if item.scored_from is None else item.scored_from
            self.prompt_lens[item.row] = item.num_prompt_tokens - item.num_evicted
            self.parts[item.row] = item.part
            self.evicted[item.row] = item.num_evicted
            self.adapters[item.row] = -1 if item.adapter is None else item.adapter
        if plan.new or (plan.departed and self.has_adapters):
            self.has_adapters = bool((self.adapters >= 0).any())
        if plan.new or (plan.departed and self.has_scored):
            self.has_scored = bool((self.scored_from != NEVER).any())
        if plan.new or plan.evictions:
            self._evict(plan)
        if plan.blocks:
            for group, tables in enumerate((self.whole, *self.windows)):
                if written := [item for item in plan.blocks if item.group == group]:
                    tables.write(written, upload)

    def _evict(self, plan: StepPlan) -> None:
        for eviction in plan.evictions:
            if (row := eviction.row) is not None:
                self.prompt_lens[row] += self.evicted[row] - eviction.num_evicted
                self.evicted[row] = eviction.num_evicted
        if plan.evictions or (plan.new and (self.has_evicted or any(item.num_evicted for item in plan.new))):
            self.has_evicted = bool(self.evicted.any())


class RowTable:
    """A table with one entry for each row. On a CPU there is nothing to carry, and it is written in place.

    Attributes:
        values: `[num_rows, *entry]`, on the device.
    """

    def __init__(
        self, num_rows: int, dtype: npt.DTypeLike, device: torch.device, entry: tuple[int, ...] = (), fill: float = 0
    ) -> None:
        shape = (num_rows, *entry)
        self._host: npt.NDArray[np.generic] | None = None
        self._dtype = np.dtype(dtype)
        if device.type == "cpu":
            # Zeros from NumPy take no memory before they are written.
            self._host = np.full(shape, fill, dtype=dtype) if fill else np.zeros(shape, dtype=dtype)
            self.values = torch.from_numpy(self._host)
        else:
            self.values = torch.full(shape, fill, dtype=DTYPES[self._dtype], device=device)

    def write(self, rows: Values[int], entries: npt.ArrayLike, upload: Upload) -> None:
        """Set the entries of some rows when the upload arrives."""
        array = np.asarray(entries, dtype=self._dtype)
        if self._host is not None:
            self._host[rows] = array
            return
        index, staged = upload.add(np.array(rows, dtype=np.int64)), upload.add(array)
        upload.on_arrival(lambda: self.values.index_copy_(0, index.tensor, staged.tensor))
