"""What is kept for each row of the batch: block tables, here and on the device.

The scheduler assigns rows. A sequence keeps its row while it is in the batch, so that what the device keeps for it need
not move. One more row, the spare one, belongs to padding: its block table is never read.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.core.plan import StepPlan
from gpu_worker.execution.batch.block_tables import BlockTables
from gpu_worker.execution.batch.layout import Int32s, Int64s
from gpu_worker.execution.batch.transfers import Upload


class BatchRows:
    """The rows.

    Attributes:
        spare: The row of padding.
        windows: Block tables of the groups of layers that keep the last tokens.
        prompt_lens: `[max_num_seqs + 1]`, prompt tokens of each row's sequence.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device, num_windows: int = 0) -> None:
        """Make room for `max_num_seqs` sequences of at most `width` blocks, in `num_windows` further groups too."""
        self.spare = max_num_seqs
        self._whole = BlockTables(max_num_seqs + 1, width, device)
        self.windows = [BlockTables(max_num_seqs + 1, width, device) for _ in range(num_windows)]
        self.prompt_lens: Int64s = np.zeros(max_num_seqs + 1, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """Rows, the spare one included."""
        return len(self.prompt_lens)

    @property
    def tables(self) -> Int32s:
        """Block tables of the layers that keep all tokens, `[num_rows, width]`, as this side knows them."""
        return self._whole.host

    def block_tables(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block tables of these rows, on the device.

        Shapes:
            rows: `[num_seqs]` int64, on the device
            result: `[num_seqs, width]` int32, contiguous
        """
        return self._whole.of(rows)

    def follow(self, plan: StepPlan, upload: Upload) -> None:
        """Bring block tables up to date with a plan."""
        for item in plan.new:
            self.prompt_lens[item.row] = item.num_prompt_tokens
        if plan.blocks:
            for group, tables in enumerate((self._whole, *self.windows)):
                if written := [item for item in plan.blocks if item.group == group]:
                    tables.write(written, upload)
