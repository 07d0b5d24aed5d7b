"""Log probabilities of the prompt tokens that follow those which a step computes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.batch_sequences import Share
from gpu_worker.core.step import LogprobEntry
from gpu_worker.execution.batch.transfers import Int32s
from gpu_worker.execution.sampling.logprobs import entries
from gpu_worker.layers.divided_vocabulary import Vocabulary
from gpu_worker.models.decoder import CausalLM
from kernels.low_rank import AdapterRows
from kernels.sampling import TokenScores

# Rows of logits at a time: bounds their memory for large vocabularies.
_ROWS = 128


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A part of a prompt whose log probabilities are wanted.

    Attributes:
        place: Of its sequence in the plan.
        first_row: The row of hidden vectors that predicts the first target.
    """

    place: int
    first_row: int
    targets: list[int]
    num_top: int


def prompt_chunks(shares: Values[Share], query_starts: Int32s) -> list[PromptChunk]:
    """Return the prompt tokens whose log probabilities the step makes known and somebody wants."""
    chunks = []
    for place, item in enumerate(shares):
        num_top = item.sequence.sampling.prompt_logprobs
        if num_top is None:
            continue
        end = min(item.start + item.num_tokens + 1, item.sequence.num_prompt_tokens)
        targets = item.sequence.token_ids[item.start + 1 : end]
        if targets:
            chunks.append(PromptChunk(place, int(query_starts[place]), targets, num_top))
    return chunks


def score_chunk(
    model: CausalLM,
    vocabulary: Vocabulary,
    hidden: torch.Tensor,
    chunk: PromptChunk,
    targets: torch.Tensor,
    adapters: AdapterRows | None = None,
) -> list[TokenScores]:
    """Compute them, without waiting for the device.

    Shapes:
        hidden: `[num_tokens, hidden_size]`, of the whole step
        targets: `[len(chunk.targets)]` int64, on the device
    """
    hidden = hidden[chunk.first_row : chunk.first_row + len(targets)]
    scores = []
    for first in range(0, len(targets), _ROWS):
        part = slice(first, first + _ROWS)
        rows = hidden[part]
        own = None if adapters is None else adapters.of(np.arange(len(rows)) + chunk.first_row + first)
        scores.append(vocabulary.score(model.logits(rows, own), targets[part], chunk.num_top))
    return scores


def chunk_entries(chunk: PromptChunk, scores: Iterable[TokenScores]) -> tuple[LogprobEntry, ...]:
    """Return what `score_chunk` computed, for the client."""
    found: list[LogprobEntry] = []
    for part in scores:
        targets = chunk.targets[len(found) : len(found) + len(part.chosen)]
        found += entries(part, targets, [chunk.num_top] * len(targets))
    return tuple(found)
