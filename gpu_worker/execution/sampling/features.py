"""What changes logits before a token is drawn: `logit_bias`, `allowed_token_ids`, `bad_words` and `min_tokens`.

A feature keeps what it needs for each row of the batch, says for each step what of that goes to the device, and applies
it there to the logits. The sampler asks it only where a sequence asks for it, so it costs other sequences nothing.

Repetition, presence and frequency penalties, from counts of tokens that the device keeps for each row.

Semantics are those of vLLM and OpenAI. Repetition looks at prompt and output: a positive logit is divided by it, any
other multiplied. Then `frequency_penalty` times the number of occurrences in the output, and `presence_penalty` once
for a token that occurs there, are subtracted.

The device counts what it draws, because the next step may be launched before the host has seen the token. Behind drafts
it does not, since only the host knows which of them were accepted; what it has learned is counted with the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.rows import RowTable
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from gpu_worker.execution.sampling.grammar_mask import GrammarMask
from gpu_worker.layers.vocabulary import Vocabulary
from kernels.logits_bitmask import forbid_tokens
from kernels.sampling import PenaltyTable, apply_penalties, count_tokens
from shared.sampling import Sampling

Float32s = npt.NDArray[np.float32]
Adjust = Callable[[torch.Tensor], None]
"""Changes a step's logits in place, `[num_rows, vocab_size]` float32; the upload was sent. Must not wait for a GPU."""


class Feature(Protocol):
    """One thing that requests may ask of the sampler, for all rows of the batch."""

    def is_asked_by(self, sampling: Sampling) -> bool:
        """Whether a request needs it."""

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        """Keep what the sequence asks for, which has been given `row`; called when `is_asked_by` says so."""

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> Adjust:
        """Prepare to sample.

        Args:
            sampled: The rows of logits.
            places: Those whose sequence asks for the feature, at least one. The same array as in the step before where
                the rows are the same and none was assigned since.
            upload: Carries what the device needs.
        """


class _Bias:
    """Keeps, for each row that has a bias, tokens and the values added to their logits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: dict[int, tuple[Int64s, Float32s]] = {}
        # What the last step was given, which the next one takes again while its rows are the same.
        self._batch: tuple[bytes, bytes] | None = None
        self._indices: Int64s = np.zeros(0, dtype=np.int64)
        self._values: Float32s = np.zeros(0, dtype=np.float32)

    def is_asked_by(self, sampling: Sampling) -> bool:
        return bool(sampling.logit_bias)

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        # Ids outside the vocabulary name no token and are left out.
        bias = sequence.sampling.logit_bias
        entries = [(token_id, value) for token_id, value in bias.items() if 0 <= token_id < self._vocab_size]
        token_ids, values = zip(*entries, strict=True) if entries else ((), ())
        self._batch = None
        self._biases[row] = np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> Adjust:
        rows = sampled.rows[places]
        batch = (places.tobytes(), rows.tobytes())
        if batch != self._batch:
            biases = [(place, *self._biases[row]) for place, row in zip(places, rows.tolist(), strict=True)]
            self._batch = batch
            self._indices = np.concatenate([token_ids + place * self._vocab_size for place, token_ids, _ in biases])
            self._values = np.concatenate([values for _, _, values in biases])
        indices, added = upload.add(self._indices), upload.add(self._values)

        def adjust(logits: torch.Tensor) -> None:
            logits.view(-1).index_add_(0, indices.tensor, added.tensor)

        return adjust


class _AllowedTokens:
    """Owns a bit for each token of each row: all others are forbidden."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._bits = RowTable(num_rows, np.int32, device, (self._num_words,))

    def is_asked_by(self, sampling: Sampling) -> bool:
        return sampling.allowed_token_ids is not None

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        # Ids outside the vocabulary name no token and are left out.
        allowed = np.array(sequence.sampling.allowed_token_ids, dtype=np.int64)
        is_allowed = np.zeros(self._num_words * 32, dtype=np.uint8)
        is_allowed[allowed[allowed < self._vocab_size]] = 1
        self._bits.write([row], np.packbits(is_allowed, bitorder="little").view(np.int32)[None], upload)

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> Adjust:
        bits, to_places, rows = self._bits.values, upload.add(places), upload.add(sampled.rows[places])

        def adjust(logits: torch.Tensor) -> None:
            forbid_tokens(logits, to_places.tensor, bits.index_select(0, rows.tensor))

        return adjust


class _BadWords:
    """Forbids the last token of a forbidden run of tokens where the output ends with the others.

    A run of several tokens looks at the output so far, so its sequence waits for its last token (`needs_last_token`).
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sequences: dict[int, BatchSequence] = {}

    def is_asked_by(self, sampling: Sampling) -> bool:
        return bool(sampling.bad_words)

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        self._sequences[row] = sequence

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> Adjust:
        rows = sampled.rows[places].tolist()
        forbidden = [
            place * self._vocab_size + token_id
            for place, row in zip(places.tolist(), rows, strict=True)
            for token_id in self._forbidden(row, () if sampled.paths is None else sampled.paths[place])
        ]
        if not forbidden:
            return lambda _: None
        indices = upload.add(np.array(forbidden, dtype=np.int64))

        def adjust(logits: torch.Tensor) -> None:
            logits.view(-1).index_fill_(0, indices.tensor, -math.inf)

        return adjust

    def _forbidden(self, row: int, path: tuple[int, ...]) -> Iterator[int]:
        """Yield the tokens that may not follow the output of a row's sequence and these drafts."""
        sequence = self._sequences[row]
        longest = max(map(len, sequence.bad_words), default=1) - 1
        first = max(sequence.num_prompt_tokens, len(sequence.token_ids) - longest)
        tail = (*sequence.token_ids[first:], *path)
        for word in sequence.bad_words:
            num_before = len(word) - 1
            if num_before <= len(tail) and tail[len(tail) - num_before :] == word[:-1]:
                yield word[-1]


class _MinTokens:
    """Forbids the tokens that would end a sequence until its output is long enough.

    Where nothing else is allowed (a grammar is complete, say), they stay allowed: the output ends early instead of
    failing.
    """

    def __init__(self, num_rows: int, vocab_size: int, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)
        self._end_ids: dict[int, Int64s] = {}

    def is_asked_by(self, sampling: Sampling) -> bool:
        return sampling.min_tokens > 0

    def assign(self, row: int, sequence: BatchSequence, upload: Upload) -> None:
        end_ids = [token_id for token_id in sequence.stop_ids if token_id < self._vocab_size]
        self._end_ids[row] = np.array(sorted(end_ids), dtype=np.int64)
        self._num_tokens[row] = sequence.sampling.min_tokens if end_ids else 0

    def stage(self, sampled: SampledRows, places: Int64s, upload: Upload) -> Adjust:
        # Behind drafts, the place in the output decides too.
        places = places[sampled.positions[places] < self._num_tokens[sampled.rows[places]]]
        if not len(places):
            return lambda _: None
        end_ids = [self._end_ids[row] for row in sampled.rows[places].tolist()]
        counts = [len(ids) for ids in end_ids]
        # Places of the ends in the logits, laid end to end, and the entry of `places` that each belongs to.
        to_places = upload.add(places)
        ends = upload.add(np.concatenate(end_ids) + np.repeat(places * self._vocab_size, counts))
        owners = upload.add(np.repeat(np.arange(len(places), dtype=np.int64), counts))

        def adjust(logits: torch.Tensor) -> None:
            flat, indices = logits.view(-1), ends.tensor
            before = flat.index_select(0, indices)
            flat.index_fill_(0, indices, -math.inf)
            has_nothing_else = self._vocabulary.highest(logits.index_select(0, to_places.tensor)) == -math.inf
            is_kept = has_nothing_else.index_select(0, owners.tensor)
            flat.index_copy_(0, indices, before.masked_fill(~is_kept, -math.inf))

        return adjust


def make_features(num_rows: int, vocab_size: int, device: torch.device, vocabulary: Vocabulary) -> list[Feature]:
    """Make all features that change logits, in the order in which they do: what forbids tokens comes last.

    That of `min_tokens` is the very last: it looks for what the others have left.
    """
    return [
        _Bias(vocab_size),
        Penalties(num_rows, vocab_size, device),
        _AllowedTokens(num_rows, vocab_size, device),
        _BadWords(vocab_size),
        GrammarMask(num_rows, vocab_size, device, vocabulary),
        _MinTokens(num_rows, vocab_size, vocabulary),
    ]


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
