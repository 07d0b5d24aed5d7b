"""How each row of the batch is sampled, on the device, written once when a sequence gets the row.

The tables that penalties need are allocated at the start, because memory that is not there when the first request with
penalties comes would end everybody's step.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as Values
from functools import partial

import numpy as np
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.layout import Int64s
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from gpu_worker.execution.sampling.penalties import has_penalties
from gpu_worker.execution.sampling.sampling_batch import GREEDY_BELOW_TEMPERATURE
from kernels.sampling import PenaltyTable, SamplingParameters, count_tokens
from shared.messages import Sampling

_ROWS_ALIGNMENT = 16
"""Columns of one tensor begin where kernels may read four values at once."""


class Needs(enum.IntFlag):
    """What a row asks for beyond a draw from the whole distribution."""

    TRUNCATION = 1
    PENALTIES = 2
    BIAS = 4
    LOGPROBS = 8


class RowParameters:
    """Sampling parameters of all rows.

    Attributes:
        vocab_size: Tokens there are.
        needs: Flags of each row, uint8.
        num_top: Alternatives that each row reports; defined for rows that report log probabilities.
        bias: For rows that have a bias, tokens and what is added to them.
        num_counted: Output tokens of each row that its counts have, or will have after the steps launched so far;
            defined for rows with penalties.
        values: On the device.
        penalties: On the device.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate them; the counts take four bytes for each row and token."""
        self.needs = np.zeros(num_rows, dtype=np.uint8)
        self.num_top = np.zeros(num_rows, dtype=np.int64)
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.num_counted = np.zeros(num_rows, dtype=np.int64)
        num_padded = -(-num_rows // _ROWS_ALIGNMENT) * _ROWS_ALIGNMENT
        self._floats = torch.ones(6, num_padded, dtype=torch.float32, device=device)
        inverse_temperature, log_min_p, top_p, repetition, frequency, presence = self._floats
        seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.values = SamplingParameters(inverse_temperature, log_min_p, top_k, top_p, seed)
        self._num_words = -(-vocab_size // 32)
        self.vocab_size = vocab_size
        self.penalties = PenaltyTable(
            repetition,
            frequency,
            presence,
            torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(num_rows, self._num_words, dtype=torch.int32, device=device),
        )

    def assign(self, newcomers: Values[Sequence], upload: Upload) -> None:
        """Write the parameters of sequences that were given a row."""
        if not newcomers:
            return
        samplings = [sequence.sampling for sequence in newcomers]
        rows = [sequence.row for sequence in newcomers if sequence.row is not None]
        self.needs[rows] = [_needs_of(sampling) for sampling in samplings]
        self.num_top[rows] = [sampling.logprobs or 0 for sampling in samplings]
        index = upload.add(np.array(rows, dtype=np.int64))
        floats = upload.add(np.array([_floats_of(sampling) for sampling in samplings], dtype=np.float32).T)
        seeds = upload.add(np.array([sampling.seed for sampling in samplings], dtype=np.int64))
        top_ks = upload.add(np.array([self._top_k_of(sampling) for sampling in samplings], dtype=np.int32))

        def write() -> None:
            self._floats.index_copy_(1, index.tensor, floats.tensor)
            self.values.seed.index_copy_(0, index.tensor, seeds.tensor)
            self.values.top_k.index_copy_(0, index.tensor, top_ks.tensor)

        upload.on_arrival(write)
        for row, sequence in zip(rows, newcomers, strict=True):
            if self.needs[row] & Needs.PENALTIES:
                self._count(row, sequence, upload)
            if self.needs[row] & Needs.BIAS:
                self.bias[row] = self._bias_of(sequence.sampling)

    def catch_up(self, sequences: Values[Sequence], rows: Int64s, upload: Upload) -> None:
        """Count the tokens that were sampled behind drafts: the sampler counts only what a row of its own draws."""
        for place in np.flatnonzero(self.needs[rows] & Needs.PENALTIES).tolist():
            row, sequence = int(rows[place]), sequences[place]
            new = sequence.token_ids[sequence.num_prompt_tokens + int(self.num_counted[row]) :]
            if new:
                self.num_counted[row] += len(new)
                slots, token_ids = upload.add(np.full(len(new), row)), upload.add(np.array(new, dtype=np.int64))
                upload.on_arrival(partial(self._count_new, slots, token_ids))

    def _count_new(self, slots: StagedArray, token_ids: StagedArray) -> None:
        count_tokens(self.penalties, slots.tensor, token_ids.tensor)

    def _count(self, row: int, sequence: Sequence, upload: Upload) -> None:
        """Write which tokens there are so far, and how often the output has each."""
        output = np.array(sequence.token_ids[sequence.num_prompt_tokens :], dtype=np.int64)
        self.num_counted[row] = len(output)
        token_ids, counts = np.unique(output, return_counts=True)
        is_seen = np.zeros(self._num_words * 32, dtype=np.uint8)
        is_seen[sequence.token_ids] = 1
        staged_ids, staged_counts = upload.add(token_ids), upload.add(counts.astype(np.int32))
        bits = upload.add(np.packbits(is_seen, bitorder="little").view(np.int32))

        def write() -> None:
            self.penalties.output_counts[row].zero_().index_copy_(0, staged_ids.tensor, staged_counts.tensor)
            self.penalties.seen_bits[row].copy_(bits.tensor)

        upload.on_arrival(write)

    def _bias_of(self, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
        """Leave out ids outside the vocabulary: they name no token."""
        entries = [(token, bias) for token, bias in sampling.logit_bias.items() if 0 <= token < self.vocab_size]
        token_ids, values = zip(*entries, strict=True) if entries else ((), ())
        return np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)

    def _top_k_of(self, sampling: Sampling) -> int:
        return min(sampling.top_k, self.vocab_size)


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW_TEMPERATURE


def _needs_of(sampling: Sampling) -> int:
    needs = 0
    if not _is_greedy(sampling) and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        needs |= Needs.TRUNCATION
    if has_penalties(sampling):
        needs |= Needs.PENALTIES
    if sampling.logit_bias:
        needs |= Needs.BIAS
    if sampling.logprobs is not None:
        needs |= Needs.LOGPROBS
    return needs


def _floats_of(sampling: Sampling) -> tuple[float, float, float, float, float, float]:
    """Return what stands in the columns of one row."""
    return (
        0.0 if _is_greedy(sampling) else 1.0 / sampling.temperature,
        math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        sampling.top_p,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
