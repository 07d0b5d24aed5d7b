"""Behind which of its tokens a step samples, and what each of these rows takes for granted. Values only; no device."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Values

import numpy as np
from msgspec import Struct

from gpu_worker.core.draft import Draft
from gpu_worker.execution.batch.layout import Int64s


class SampledRows(Struct, frozen=True, gc=False):
    """Rows of logits, in the order of the step's tokens.

    Attributes:
        tokens: `[num_rows]`, the token that each is behind.
        rows: `[num_rows]`, the row in the batch of its sequence.
        positions: `[num_rows]`, place in its output of what each row samples.
        paths: The drafts that each row takes for granted; None where every row is behind a sequence's last token.
    """

    tokens: Int64s
    rows: Int64s
    positions: Int64s
    paths: list[tuple[int, ...]] | None = None

    def tiles(self, size: int) -> Iterator[SampledRows]:
        """Yield at most `size` rows at a time."""
        if len(self.rows) <= size:
            yield self
            return
        for start in range(0, len(self.rows), size):
            part = slice(start, start + size)
            paths = None if self.paths is None else self.paths[part]
            yield SampledRows(self.tokens[part], self.rows[part], self.positions[part], paths)


def rows_behind_drafts(last: Int64s, rows: Int64s, positions: Int64s, drafts: Values[Draft]) -> SampledRows:
    """Return the rows of sequences that verify drafts: the one behind the last known token, then one behind each draft.

    Args:
        last: The last token of each sequence in the step, drafts included.
        rows: The row of each sequence in the batch.
        positions: Place in its output of the token that follows each sequence's last known one.
        drafts: Of each sequence.
    """
    depths = [depth for draft in drafts for depth in (0, *draft.depths())]
    paths = [path for draft in drafts for path in draft.paths()]
    counts = np.array([len(draft) + 1 for draft in drafts], dtype=np.int64)
    ends = counts.cumsum()
    tokens = np.repeat(last + 1 - ends, counts) + np.arange(len(depths), dtype=np.int64)
    positions = np.repeat(positions, counts) + np.array(depths, dtype=np.int64)
    return SampledRows(tokens, np.repeat(rows, counts), positions, paths)
