"""Repetition, presence and frequency penalties, from counts of tokens that the device keeps for each row.

Semantics are those of vLLM and OpenAI. Repetition looks at prompt and output: a positive logit is divided by it, any
other multiplied. Then `frequency_penalty` times the number of occurrences in the output, and `presence_penalty` once
for a token that occurs there, are subtracted.

The device counts what it draws, because the next step may be launched before the host has seen the token. Behind drafts
it does not, since only the host knows which of them were accepted; what it has learned is counted with the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.rows import RowTable
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from kernels.sampling import PenaltyTable, apply_penalties, count_tokens
from shared.sampling import Sampling


class Penalties:
    """Owns the counts. The tables are allocated at the start.

    Memory that is not there when the first request with penalties comes would end the step of all requests.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate the tables; the counts take four bytes for each row and token. The last row is the spare one."""
        self._spare = num_rows - 1
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._repetition = RowTable(num_rows, np.float32, device, fill=1.0)
        self._frequency = RowTable(num_rows, np.float32, device)
        self._presence = RowTable(num_rows, np.float32, device)
        self._counts = RowTable(num_rows, np.int32, device, (vocab_size,))
        self._seen_bits = RowTable(num_rows, np.int32, device, (self._num_words,))
        self._table = PenaltyTable(
            self._repetition.values,
            self._frequency.values,
            self._presence.values,
            self._counts.values,
            self._seen_bits.values,
        )
        self._sequences: dict[int, BatchSequence] = {}
        # Output tokens that the counts have, or will have after the steps launched so far.
        self._num_counted = np.zeros(num_rows, dtype=np.int64)

    def is_asked_by(self, sampling: Sampling) -> bool:
        """Return whether any of the three penalties does something."""
        return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """See `Feature`. The output so far is counted with the first step, like learned tokens."""
        sampling = sequence.sampling
        self._repetition.write([row], [sampling.repetition_penalty], upload)
        self._frequency.write([row], [sampling.frequency_penalty], upload)
        self._presence.write([row], [sampling.presence_penalty], upload)
        in_prompt = np.zeros(self._num_words * 32, dtype=np.uint8)
        in_prompt[sequence.token_ids[: sequence.num_prompt_tokens]] = 1
        self._seen_bits.write([row], np.packbits(in_prompt, bitorder="little").view(np.int32)[None], upload)
        upload.on_arrival(self._table.output_counts[row].zero_)
        self._sequences[row] = sequence
        self._num_counted[row] = 0

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedPenalties:
        """See `Feature`."""
        news = [(row, token_id) for row in dict.fromkeys(sampled.rows[places].tolist()) for token_id in self._new(row)]
        learned = np.array(news, dtype=np.int64).reshape(-1, 2).T
        staged = (upload.add(learned[0]), upload.add(learned[1])) if news else None
        rows = np.full(len(sampled.rows), self._spare, dtype=np.int64)
        rows[places] = sampled.rows[places]
        if sampled.paths is not None:
            return StagedPenalties(self._table, upload.add(rows), staged, upload.add(_padded(sampled.paths)))
        self._num_counted[rows[places]] += 1
        return StagedPenalties(self._table, upload.add(rows), staged, None)

    def _new(self, row: int) -> list[int]:
        """Return the output tokens that the host has learned and the device has not counted."""
        sequence = self._sequences[row]
        new = sequence.token_ids[sequence.num_prompt_tokens + int(self._num_counted[row]) :]
        self._num_counted[row] += len(new)
        return new


@dataclass(frozen=True, slots=True)
class StagedPenalties:
    """The penalties of a step.

    Attributes:
        table: Of all rows of the batch.
        rows: The row in the batch of each row of logits; the spare one, which has no penalties, of those without any.
        learned: Rows and tokens to count first.
        drafts: What each row of logits counts as if it were in the output, filled up with -1; None where the drawn
            tokens are the output's next, which the device counts.
    """

    table: PenaltyTable
    rows: StagedArray
    learned: tuple[StagedArray, StagedArray] | None
    drafts: StagedArray | None

    def __call__(self, logits: torch.Tensor) -> None:
        """Penalise tokens; see `Adjust`."""
        if self.learned is not None:
            rows, token_ids = self.learned
            count_tokens(self.table, rows.tensor, token_ids.tensor)
        apply_penalties(logits, self.rows.tensor, self.table, None if self.drafts is None else self.drafts.tensor)

    def count(self, token_ids: torch.Tensor) -> None:
        """Count which token was drawn for each row, a negative one where the logits were no distribution."""
        if self.drafts is None:
            count_tokens(self.table, self.rows.tensor, token_ids)


def _padded(paths: list[tuple[int, ...]]) -> Int64s:
    """Return paths as the rows of an array, filled up with -1."""
    padded = np.full((len(paths), max(1, *map(len, paths))), -1, dtype=np.int64)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    return padded
