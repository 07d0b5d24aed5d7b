"""Masks of tokens that the output's grammar forbids.

They are filled when the step's forward pass has been launched: a device computes while the host works on them.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.transfers import Int32s, Int64s, StagedArray, Upload
from gpu_worker.layers.vocabulary import Vocabulary
from kernels.logits_bitmask import forbid_tokens
from shared.sampling import Sampling


class GrammarMask:
    """Keeps the constraint of each row whose output follows a grammar, and the memory of a step's masks."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, vocabulary: Vocabulary) -> None:
        """Know nothing of any row."""
        self._vocabulary = vocabulary
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._constraints: dict[int, OutputConstraint | None] = {}
        # Those of the last step, and its places: the sampler hands the same on as long as no row changes.
        self._asking: list[OutputConstraint | None] = []
        self._places: Int64s | None = None
        self._words: Int32s = np.zeros((num_rows, self._num_words), dtype=np.int32)
        self._masks = HostMasks(self._words)

    def is_asked_by(self, sampling: Sampling) -> bool:
        """See `Feature`."""
        return sampling.grammar is not None

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """See `Feature`."""
        is_known = sequence.constraint is not None or not self._vocabulary.is_first
        assert is_known, "a sequence with a grammar has no constraint"
        self._constraints[row] = sequence.constraint
        self._places = None

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedGrammarMask:
        """See `Feature`."""
        if places is not self._places:
            self._asking = [self._constraints[row] for row in sampled.rows[places].tolist()]
            self._places = places
        constraints = self._asking
        paths = None if sampled.paths is None else [sampled.paths[place] for place in places.tolist()]
        masks = self._masks_of(len(constraints))
        return StagedGrammarMask(upload.add(places), constraints, paths, masks, self._device, self._vocabulary)

    def _masks_of(self, count: int) -> HostMasks:
        """Return the memory of `count` masks; steps usually need as many as the one before."""
        if count > len(self._words):
            self._words = np.zeros((2 * count, self._num_words), dtype=np.int32)
        if count != len(self._masks.addresses):
            self._masks = HostMasks(self._words[:count])
        return self._masks


class HostMasks:
    """Memory for the masks of a step, which the next step writes again.

    Attributes:
        words: `[num_masks, num_words]`.
        tensor: The same memory.
        addresses: Of the first word of each mask.
    """

    __slots__ = ("addresses", "tensor", "words")

    def __init__(self, words: Int32s) -> None:
        """Use the memory of `words`."""
        self.words = words
        self.tensor = torch.from_numpy(words)
        first, stride = words.ctypes.data, words.strides[0]
        self.addresses = [first + number * stride for number in range(len(words))]


class StagedGrammarMask(Struct, frozen=True, gc=False):
    """The masks of a step, not filled yet.

    Attributes:
        constraints: The constraint of each; None where another process has it.
        paths: The drafts that each takes for granted; None where there are no drafts.
    """

    places: StagedArray
    constraints: list[OutputConstraint | None]
    paths: list[tuple[int, ...]] | None
    masks: HostMasks
    device: torch.device
    vocabulary: Vocabulary

    def __call__(self, logits: torch.Tensor) -> None:
        """Forbid tokens; see `Adjust`."""
        masks = self.shared()
        if self.device.type == "cpu":
            forbid_tokens(logits, self.places.tensor, masks)
            return
        # Sending copies, so that the next step may write while the device reads.
        upload = Upload(self.device)
        staged = upload.add(self.masks.words)
        upload.send()
        forbid_tokens(logits, self.places.tensor, staged.tensor)

    def shared(self) -> torch.Tensor:
        """Fill the masks whose constraints are known here, and return all: `[num_masks, num_words]` on the host."""
        paths = self.paths or [()] * len(self.constraints)
        for constraint, drafts, address in zip(self.constraints, paths, self.masks.addresses, strict=True):
            if constraint is not None:
                constraint.fill_mask(drafts, address)
        return self.vocabulary.share(self.masks.tensor)
