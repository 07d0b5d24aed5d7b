"""Masks of tokens that the output's grammar forbids.

They are filled when the step's forward pass has been launched: a device computes while the host works on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.layout import Int32s, Int64s
from gpu_worker.execution.batch.sampled_rows import SampledRows
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from kernels.logits_bitmask import forbid_tokens
from shared.sampling import Sampling


class GrammarMask:
    """Keeps the constraint of each row whose output follows a grammar, and the memory of a step's masks."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Know nothing of any row."""
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._constraints: list[OutputConstraint | None] = [None] * num_rows
        self._masks = HostMasks(1, self._num_words)

    def is_asked_by(self, sampling: Sampling) -> bool:
        """See `Feature`."""
        return sampling.grammar is not None

    def assign(self, row: int, sequence: Sequence, upload: Upload) -> None:
        """See `Feature`."""
        assert sequence.constraint is not None, "a sequence with a grammar has no constraint"
        self._constraints[row] = sequence.constraint

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedGrammarMask:
        """See `Feature`."""
        constraints = [self._constraints[row] for row in sampled.rows[places].tolist()]
        paths = None if sampled.paths is None else [sampled.paths[place] for place in places.tolist()]
        if len(constraints) > len(self._masks.words):
            self._masks = HostMasks(2 * len(constraints), self._num_words)
        return StagedGrammarMask(upload.add(places), constraints, paths, self._masks, self._device)


class HostMasks:
    """Memory for the masks of a step, which the next step writes again.

    Attributes:
        words: `[num_masks, num_words]`.
        tensor: The same memory.
        address: Of its first word.
    """

    __slots__ = ("address", "tensor", "words")

    def __init__(self, num_masks: int, num_words: int) -> None:
        """Allocate it."""
        self.words: Int32s = np.zeros((num_masks, num_words), dtype=np.int32)
        self.tensor = torch.from_numpy(self.words)
        self.address: int = self.words.ctypes.data


@dataclass(frozen=True, slots=True)
class StagedGrammarMask:
    """The masks of a step, not filled yet.

    Attributes:
        places: Rows of logits with a mask.
        constraints: The constraint of each.
        paths: The drafts that each takes for granted; None where there are no drafts.
        masks: Where they are filled.
        device: Where the logits are.
    """

    places: StagedArray
    constraints: list[OutputConstraint | None]
    paths: list[tuple[int, ...]] | None
    masks: HostMasks
    device: torch.device

    def adjust(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """See `StagedFeature`."""
        count, address, stride = len(self.constraints), self.masks.address, self.masks.words.strides[0]
        for number, constraint in enumerate(self.constraints):
            assert constraint is not None, "the row was never assigned"
            constraint.fill_mask(() if self.paths is None else self.paths[number], address + number * stride)
        if self.device.type == "cpu":
            forbid_tokens(logits, self.places.tensor, self.masks.tensor[:count])
            return
        # Sending copies, so that the next step may write while the device reads.
        upload = Upload(self.device)
        staged = upload.add(self.masks.words[:count])
        upload.send()
        forbid_tokens(logits, self.places.tensor, staged.tensor)

    def take_drawn(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Ignore it: the scheduler tells the constraint what was drawn."""
