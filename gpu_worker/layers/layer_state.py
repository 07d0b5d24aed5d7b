"""The state of a recurrent layer for all sequences of a batch, and the drafts whose part in it is not decided yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class LayerState:
    """The memory of one layer. Kernels update it in place, so that its addresses never change.

    Attributes:
        parts: Tensors of the state, `[num_slots, ...]` float32 each.
        drafts: `[num_slots, max_draft_tokens, num_inputs]` float32: what the layer computed of the draft tokens of a
            sequence's last step, before it came to the state. None where no drafts are verified.
    """

    parts: tuple[torch.Tensor, ...]
    drafts: torch.Tensor | None

    def keep_drafts(self, rows: StateRows, inputs: torch.Tensor) -> None:
        """Keep what the layer computed of tokens that the state is not to remember yet.

        The shapes of what is done do not depend on how many drafts there are, so that it can be captured.

        Shapes:
            inputs: `[num_tokens, num_inputs]`
        """
        if self.drafts is None or rows.num_kept is None:
            return
        first = (rows.query_starts[:-1] + rows.num_kept).long()
        tokens = first[:, None] + torch.arange(self.drafts.shape[1], device=inputs.device)
        # Behind a sequence's drafts stands anything; it is never read.
        tokens.clamp_(max=len(inputs) - 1)
        kept = inputs.index_select(0, tokens.view(-1)).to(self.drafts.dtype)
        self.drafts.index_copy_(0, rows.slots, kept.view(len(rows.slots), *self.drafts.shape[1:]))

    def kept_drafts(self, places: torch.Tensor) -> torch.Tensor:
        """Return what was kept of some drafts.

        Shapes:
            places: `[num_tokens]` int64, `slot * max_draft_tokens + number`
            result: `[num_tokens, num_inputs]` float32
        """
        assert self.drafts is not None, "no drafts were kept"
        return self.drafts.flatten(0, 1).index_select(0, places)
