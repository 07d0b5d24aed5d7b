"""Log probabilities for the client: of the model's own distribution, before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.step import LogprobEntry
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.transfers import Int32s, Int64s, StagedArray, Upload
from gpu_worker.layers.vocabulary import Vocabulary
from gpu_worker.models.decoder import CausalLM
from kernels.low_rank import AdapterRows
from kernels.sampling import TokenScores


def entries(scores: TokenScores, token_ids: Values[int], num_top: Values[int]) -> list[LogprobEntry]:
    """Return one entry a row of scores, which are on the host."""
    columns = (scores.chosen.tolist(), scores.top_ids.tolist(), scores.top_values.tolist())
    return [
        LogprobEntry(token_id, chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, count, chosen, ids, values in zip(token_ids, num_top, *columns, strict=True)
    ]


class LogprobRows:
    """Keeps what each row of the batch reports: how many likely tokens, or which ones."""

    def __init__(self, num_rows: int, vocab_size: int, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._num_top = np.zeros(num_rows, dtype=np.int64)
        self._listed: dict[int, Int64s] = {}

    def assign(self, rows: Values[int], newcomers: Values[BatchSequence]) -> None:
        """Keep what sequences ask for that were given rows. Ids outside the vocabulary name no token: left out."""
        self._num_top[rows] = [sequence.sampling.logprobs or 0 for sequence in newcomers]
        for row, sequence in zip(rows, newcomers, strict=True):
            self._listed.pop(row, None)
            if sequence.sampling.logprob_token_ids:
                listed = np.array(sequence.sampling.logprob_token_ids, dtype=np.int64)
                self._listed[row] = listed[listed < self._vocab_size]

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> StagedLogprobs:
        """Prepare to report `places` of the rows of logits, at least one."""
        rows = sampled.rows[places]
        num_top = self._num_top[rows].tolist()
        listed = None
        if self._listed and any(row in self._listed for row in rows.tolist()):
            listed = self._stage_listed(rows.tolist(), upload)
        return StagedLogprobs(places.tolist(), num_top, upload.add(places), listed, self._vocabulary)

    def _stage_listed(self, rows: list[int], upload: Upload) -> StagedList:
        lists = {place: self._listed[row] for place, row in enumerate(rows) if row in self._listed}
        padded = np.full((len(lists), max(map(len, lists.values()))), -1, dtype=np.int64)
        for line, listed in zip(padded, lists.values(), strict=True):
            line[: len(listed)] = listed
        places = list(lists)
        return StagedList(
            dict(zip(places, map(len, lists.values()), strict=True)), upload.add(np.array(places)), upload.add(padded)
        )


@dataclass(frozen=True, slots=True)
class StagedList:
    """The tokens that some of the rows that report have listed."""

    num_listed: dict[int, int]
    _places: StagedArray
    _token_ids: StagedArray

    def put(
        self, scores: TokenScores, kept: torch.Tensor, token_ids: torch.Tensor, vocabulary: Vocabulary
    ) -> TokenScores:
        """Put the listed tokens in the place of the most likely tokens, the most likely first.

        Shapes:
            kept: `[num_reporting, vocab_size]` float32, the logits
            token_ids: `[num_reporting]` int64, the token of each row
        """
        places, listed = self._places.tensor, self._token_ids.tensor
        logits = kept.index_select(0, places)
        chosen = token_ids.index_select(0, places)[:, None]
        log_sums = vocabulary.values(logits, chosen) - scores.chosen.index_select(0, places)[:, None]
        values = vocabulary.values(logits, listed.clamp(min=0)) - log_sums
        # What only fills the lines up comes last, behind tokens that cannot be.
        order = values.masked_fill(listed < 0, -torch.inf).argsort(dim=1, descending=True, stable=True)
        width = max(scores.top_ids.shape[1], listed.shape[1])
        top_ids, top_values = _widened(scores.top_ids, width), _widened(scores.top_values, width)
        top_ids[places, : listed.shape[1]] = listed.gather(1, order).to(top_ids.dtype)
        top_values[places, : listed.shape[1]] = values.gather(1, order).to(top_values.dtype)
        return TokenScores(scores.chosen, top_ids, top_values)


def _widened(scores: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(scores, (0, width - scores.shape[1]))


@dataclass(frozen=True, slots=True)
class StagedLogprobs:
    """The reports of a step.

    Attributes:
        places: Rows of the logits that report.
        num_top: How many of the most likely tokens each of `places` reports.
    """

    places: list[int]
    num_top: list[int]
    _index: StagedArray
    _listed: StagedList | None
    _vocabulary: Vocabulary

    def num_reported(self) -> list[int]:
        """Return how many tokens each row reports."""
        if self._listed is None:
            return self.num_top
        return [self._listed.num_listed.get(place, count) for place, count in enumerate(self.num_top)]

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rows that report, before anything changes them."""
        return logits.index_select(0, self._index.tensor)

    def score(self, kept: torch.Tensor, token_ids: torch.Tensor) -> TokenScores:
        """Score the tokens drawn for all rows of logits; the scores of invalid tokens mean nothing."""
        chosen = token_ids.index_select(0, self._index.tensor).clamp_(min=0)
        scores = self._vocabulary.score(kept, chosen, max(self.num_top))
        return scores if self._listed is None else self._listed.put(scores, kept, chosen, self._vocabulary)


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
    """Return the prompt tokens whose requested log probabilities the step computes."""
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
        scores.append(model.vocabulary.score(model.logits(rows, own), targets[part], chunk.num_top))
    return scores


def chunk_entries(chunk: PromptChunk, scores: Iterable[TokenScores]) -> tuple[LogprobEntry, ...]:
    """Return what `score_chunk` computed, for the client."""
    found: list[LogprobEntry] = []
    for part in scores:
        targets = chunk.targets[len(found) : len(found) + len(part.chosen)]
        found += entries(part, targets, [chunk.num_top] * len(targets))
    return tuple(found)
