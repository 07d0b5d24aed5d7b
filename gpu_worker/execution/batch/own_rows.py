"""The rows of a step whose KV blocks are here, where each of several processes has one part of these."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.step_table import HostStep, StagedStep, StepArrays, step_context
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.layers.attention_context import OwnTokens


class OwnRows:
    """On their way to the device.

    Attributes:
        layout: Of their tokens, as if these were all of the step; None where there are none.
    """

    def __init__(self, step: HostStep, is_own: npt.NDArray[np.bool_], upload: Upload) -> None:
        """Select the sequences, `[num_seqs]`, whose blocks are here."""
        lengths = np.diff(step.query_starts)
        tokens = np.flatnonzero(np.repeat(is_own, lengths)).astype(np.int64)
        self._places = upload.add(tokens)
        self.layout: HostStep | None = None
        if not len(tokens):
            return
        context_lens, starts = step.context_lens[is_own], np.zeros(int(is_own.sum()) + 1, dtype=np.int32)
        starts[1:] = lengths[is_own].cumsum()
        self.layout = StepArrays(
            step.token_ids[tokens],
            step.token_rows[tokens],
            step.positions[tokens],
            step.slots[tokens],
            step.rows[is_own],
            starts,
            context_lens,
            max_query_len=int(lengths[is_own].max()),
            max_context_len=int(context_lens.max()),
        )
        self._staged = StagedStep(self.layout, upload)

    @classmethod
    def of(cls, step: HostStep, rows: BatchRows, cache: KVCache, upload: Upload) -> OwnRows | None:
        """Select those of a cache; None where it has all."""
        return cls(step, rows.parts[step.rows] == cache.part, upload) if cache.num_parts > 1 else None

    def tokens(self, rows: BatchRows, cache: KVCache, num_expanded_blocks: int) -> OwnTokens:
        """Return the tokens; the upload was sent."""
        if self.layout is None:
            return OwnTokens(self._places.tensor, None)
        longest, step = self.layout.max_context_len, self._staged.tensors
        context = step_context(step, rows, cache, None, longest, num_expanded_blocks=num_expanded_blocks)
        return OwnTokens(self._places.tensor, context)
