"""Runs the sampler on logits that a test made up, over rows of the batch that sequences keep."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens
from gpu_worker.execution.batch.assembled_step import SampledRows, rows_behind_drafts
from gpu_worker.execution.batch.transfers import Downloads, Upload
from gpu_worker.execution.sampling.sampler import Sampler
from gpu_worker.execution.step import StepOutputs, SubmittedStep
from tests.gpu_worker.plans import batch_sequence

NUM_ROWS = 513


class SamplerRun:
    """A sampler and the rows that it has given to sequences. Several runs may sample for one sequence."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.sampler = Sampler(NUM_ROWS, vocab_size, self.device)
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(NUM_ROWS - 2, -1, -1))

    def sample(self, logits: torch.Tensor, sequences: Values[Sequence]) -> list[SampledTokens]:
        """Choose the next token of each sequence."""
        rows = self._place(sequences)
        positions = np.array([sequence.num_output_tokens for sequence in sequences])
        return self._sample(logits, SampledRows(np.arange(len(rows)), rows, positions), None)

    def leave(self, sequence: Sequence) -> None:
        """Give a sequence's row to the next one."""
        self._free.append(self._rows.pop(sequence))

    def verify(self, logits: torch.Tensor, sequences: Values[Sequence], drafts: list[Draft]) -> list[SampledTokens]:
        """Choose as many tokens of each sequence as its draft was right, and one more."""
        rows = self._place(sequences)
        last = np.cumsum([len(draft) + 1 for draft in drafts]) - 1
        positions = np.array([sequence.num_output_tokens for sequence in sequences])
        return self._sample(logits, rows_behind_drafts(last, rows, positions, drafts), drafts)

    def _place(self, sequences: Values[Sequence]) -> np.ndarray:
        newcomers = []
        for sequence in sequences:
            if sequence not in self._rows:
                self._rows[sequence] = self._free.pop()
                newcomers.append(batch_sequence(sequence, self._rows[sequence]))
        upload = Upload(self.device)
        self.sampler.assign(newcomers, upload)
        upload.send()
        return np.array([self._rows[sequence] for sequence in sequences])

    @torch.inference_mode()
    def _sample(self, logits: torch.Tensor, sampled: SampledRows, drafts: list[Draft] | None) -> list[SampledTokens]:
        upload = Upload(self.device)
        staged = self.sampler.stage(sampled, upload)
        upload.send()
        drawn = self.sampler.sample(logits.to(self.device, copy=True), staged)
        count = len(sampled.rows) if drafts is None else len(drafts)
        outputs = StepOutputs([True] * count, [drawn], [], drafts)
        return SubmittedStep(0, outputs, Downloads(self.device)).result().sampled
