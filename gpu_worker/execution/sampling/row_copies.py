"""Parameters for rows of logits several of which belong to one sequence: each with the drafts that it comes behind."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.execution.batch.layout import Int64s
from gpu_worker.execution.batch.sampled_rows import Ahead
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.sampling.row_parameters import ROWS_ALIGNMENT, RowParameters, add_counts
from kernels.sampling import PenaltyTable, SamplingParameters


class RowCopies:
    """What to copy from the parameters of the batch, on its way to the device."""

    def __init__(self, parameters: RowParameters, rows: Int64s, positions: Int64s, upload: Upload) -> None:
        """Add what tells the copies from one another to the upload.

        Args:
            parameters: Of the batch.
            rows: Those to copy, at least one.
            positions: Place in the output of what each copy samples.
            upload: Carries it.
        """
        padding = -len(rows) % ROWS_ALIGNMENT
        self._parameters = parameters
        self._slots = upload.add(np.arange(len(rows), dtype=np.int64))
        self._rows = upload.add(np.pad(rows, (0, padding), mode="edge"))
        self._positions = upload.add(np.pad(positions, (0, padding)))

    @property
    def slots(self) -> torch.Tensor:
        """The copy of each row. The upload was sent."""
        return self._slots.tensor

    def values(self) -> SamplingParameters:
        """Return the parameters. The upload was sent."""
        return self._parameters.copies(self._rows.tensor, self._positions.tensor)

    def penalties(self) -> PenaltyTable:
        """Return the penalties, the drafts not counted. The upload was sent."""
        return self._parameters.penalty_copies(self._rows.tensor)


class PenalisedCopies:
    """Copies of the rows with penalties, whose counts include the drafts.

    Only these rows get counts of their own, which take as much memory as their logits.
    """

    def __init__(self, parameters: RowParameters, rows: Int64s, ahead: Ahead, places: Int64s, upload: Upload) -> None:
        """Choose `places` of the rows of logits; the rest is as for `RowCopies`."""
        paths = [ahead.paths[place] for place in places.tolist()]
        tokens = [copy * parameters.vocab_size + token_id for copy, path in enumerate(paths) for token_id in path]
        self.copies = RowCopies(parameters, rows[places], ahead.positions[places], upload)
        self._places = upload.add(places)
        self._drafts = upload.add(np.array(tokens, dtype=np.int64))

    @property
    def places(self) -> torch.Tensor:
        """The rows of logits. The upload was sent."""
        return self._places.tensor

    def penalties(self) -> PenaltyTable:
        """Return the penalties, the drafts counted. The upload was sent."""
        table = self.copies.penalties()
        add_counts(table.output_counts, self._drafts)
        return table
