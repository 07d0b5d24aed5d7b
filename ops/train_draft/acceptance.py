"""How many tokens of a draft would have been accepted, had the target verified them greedily."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ops.train_draft.rows import Rows
from ops.train_draft.student import Student

ANSWER_TOKENS = 128
"""How much of what the target wrote counts: left alone for long, small models repeat themselves, too easy to draft."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was measured.

    Attributes:
        by_position: For each token of a draft, in order, the share of drafts of which it and all before were accepted.
        num_drafts: Drafts that were looked at.
    """

    by_position: tuple[float, ...]
    num_drafts: int

    @property
    def mean_length(self) -> float:
        """Accepted tokens of a draft, on average; a step makes one token more."""
        return sum(self.by_position)


@torch.inference_mode()
def measure(student: Student, rows: Rows, own_from: torch.Tensor, count: int) -> Acceptance:
    """Measure a student on what the target wrote greedily, where the right token is the next one.

    Args:
        student: Drafts at each place of each row.
        rows: Each ends with what the target wrote.
        own_from: `[num_rows]`, where that begins.
        count: Tokens of a draft.
    """
    total, num_drafts = torch.zeros(0, dtype=torch.int64), 0
    for number, begin in enumerate(own_from.tolist()):
        batch = rows.batch(torch.tensor([number]))
        drafts = student.draft_tokens(batch, count)[0]
        first, depth = student.first_distance, drafts.shape[1]
        # A draft hangs behind a token that the target wrote, and ends before the answer does.
        end = min(batch.token_ids.shape[1], begin + ANSWER_TOKENS)
        begin = max(0, begin + 1 - first)
        places = torch.arange(begin, max(begin, end - first - depth + 1))
        wanted = batch.token_ids[0][places[:, None] + first + torch.arange(depth)]
        accepted = (drafts[places] == wanted).long().cumprod(1).sum(0)
        total = accepted if num_drafts == 0 else total + accepted
        num_drafts += len(places)
    return Acceptance(tuple((total / max(1, num_drafts)).tolist()), num_drafts)
