"""Repetition, presence and frequency penalties, from token counts that grow with the sequence.

Semantics are those of vLLM and OpenAI. Repetition looks at prompt and output: a positive logit is divided by it, any
other multiplied. Then `frequency_penalty` times the number of occurrences in the output, and `presence_penalty` once
for a token that occurs there, are subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.sequence import Sequence
from shared.messages import Sampling


def has_penalties(sampling: Sampling) -> bool:
    """Return True when any of the three penalties does something."""
    return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


@dataclass(frozen=True, slots=True)
class CountedTokens:
    """What one row of logits is penalised by.

    Attributes:
        token_ids: The distinct tokens of prompt and output.
        output_counts: Occurrences of each in the output.
        penalties: Repetition, frequency and presence penalty.
    """

    token_ids: npt.NDArray[np.int64]
    output_counts: npt.NDArray[np.float32]
    penalties: tuple[float, float, float]


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs in its output."""

    __slots__ = ("_num_prompt_tokens", "_num_seen", "_output_counts", "_sampling", "_slots", "_token_ids")

    def __init__(self, sequence: Sequence) -> None:
        """Count nothing yet; `update` catches up with the sequence."""
        self._sampling = sequence.sampling
        self._num_prompt_tokens = sequence.num_prompt_tokens
        self._num_seen = 0
        self._slots: dict[int, int] = {}
        self._token_ids = np.zeros(64, dtype=np.int64)
        self._output_counts = np.zeros(64, dtype=np.float32)

    def update(self, token_ids: list[int]) -> None:
        """Count the tokens that were added since the last call. Tokens are only ever appended."""
        slots = self._slots
        for position in range(self._num_seen, len(token_ids)):
            token_id = token_ids[position]
            slot = slots.setdefault(token_id, len(slots))
            if slot == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._output_counts = np.concatenate((self._output_counts, np.zeros_like(self._output_counts)))
            self._token_ids[slot] = token_id
            self._output_counts[slot] += position >= self._num_prompt_tokens
        self._num_seen = len(token_ids)

    def counted(self, ahead: tuple[int, ...] = ()) -> CountedTokens:
        """Return the counts as they would be with the output longer by `ahead`; valid until the next update."""
        size = len(self._slots)
        token_ids, output_counts = self._token_ids[:size], self._output_counts[:size]
        if ahead:
            unseen = {token_id: None for token_id in ahead if token_id not in self._slots}
            new_places = {token_id: size + index for index, token_id in enumerate(unseen)}
            token_ids = np.concatenate((token_ids, np.array([*unseen], dtype=np.int64)))
            output_counts = np.concatenate((output_counts, np.zeros(len(unseen), dtype=np.float32)))
            for token_id in ahead:
                output_counts[new_places.get(token_id, self._slots.get(token_id, 0))] += 1
        sampling = self._sampling
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        return CountedTokens(token_ids, output_counts, penalties)


def apply_penalties(logits: torch.Tensor, rows: Values[int], counts: Values[CountedTokens]) -> None:
    """Penalise `logits[rows[i]]` by `counts[i]`, in place.

    Shapes:
        logits: `[num_rows, vocab_size]` float32, contiguous
    """
    sizes = [len(count.token_ids) for count in counts]
    offsets = np.repeat(np.asarray(rows, dtype=np.int64) * logits.shape[1], sizes)
    indices = _to(logits, np.concatenate([count.token_ids for count in counts]) + offsets)
    output_counts = _to(logits, np.concatenate([count.output_counts for count in counts]))
    per_row = np.asarray([count.penalties for count in counts], dtype=np.float32)
    repetition, frequency, presence = _to(logits, np.repeat(per_row, sizes, axis=0)).unbind(1)
    flat = logits.view(-1)
    values = flat[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * output_counts
    values -= presence * (output_counts > 0)
    flat[indices] = values


def _to(logits: torch.Tensor, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(logits.device)
