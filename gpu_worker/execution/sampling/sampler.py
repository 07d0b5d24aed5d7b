"""From logits to tokens, for all rows of a batch together; what no row asks for costs nothing.

Order: log probabilities are taken from the model's own logits; then come the features as `make_features` orders them;
then one draw with the uniform number of (seed, position in the output), or by the mark of a watermark. Nothing here
waits for the device.

The distribution that a token is drawn from: temperature, `min_p`, `top_k`, `top_p`, and the seed of the draw.

`kernels.sampling` says what they mean. Every row of the batch has one, greedy ones included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.batch.assembled_step import SampledRows
from gpu_worker.execution.batch.rows import RowTable
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from gpu_worker.execution.sampling.features import Adjust, Feature, StagedPenalties, make_features
from gpu_worker.execution.sampling.logprobs import LogprobRows, StagedLogprobs
from gpu_worker.layers.vocabulary import Vocabulary
from kernels.sampling import SamplingParameters, TokenScores
from shared.sampling import LEAST_TEMPERATURE, Sampling
from shared.watermark import CONTEXT, mark_of


class Distributions:
    """Owns the parameters of all rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._inverse_temperature = RowTable(num_rows, np.float32, device, fill=1.0)
        self._log_min_p = RowTable(num_rows, np.float32, device, fill=-math.inf)
        self._top_k = RowTable(num_rows, np.int32, device)
        self._top_p = RowTable(num_rows, np.float32, device, fill=1.0)
        self._seed = RowTable(num_rows, np.int64, device)
        tables = (self._inverse_temperature, self._log_min_p, self._top_k, self._top_p, self._seed)
        self._parameters = SamplingParameters(*(table.values for table in tables))

    def is_truncated_by(self, sampling: Sampling) -> bool:
        """Return whether a request's tokens are drawn from a part of their distribution."""
        return not _is_greedy(sampling) and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)

    def assign(self, rows: Values[int], newcomers: Values[BatchSequence], upload: Upload) -> None:
        """Write the parameters of sequences that were given rows."""
        samplings = [sequence.sampling for sequence in newcomers]
        self._inverse_temperature.write(rows, [_inverse_temperature(sampling) for sampling in samplings], upload)
        self._log_min_p.write(rows, [_log_min_p(sampling) for sampling in samplings], upload)
        self._top_k.write(rows, [min(sampling.top_k, self._vocab_size) for sampling in samplings], upload)
        self._top_p.write(rows, [sampling.top_p for sampling in samplings], upload)
        self._seed.write(rows, [sampling.seed for sampling in samplings], upload)

    def stage(
        self, sampled: SampledRows, upload: Upload, *, may_truncate: bool, marks: StagedArray | None = None
    ) -> StagedDraw:
        """Prepare to draw a token for each row of logits; `may_truncate` where `is_truncated_by` says so of any."""
        return StagedDraw(self._parameters, upload.add(sampled.positions), may_truncate, marks)


class StagedDraw(Struct, frozen=True, gc=False):
    """The draws of a step.

    Attributes:
        positions: Place in its output of what each row of logits draws.
        may_truncate: Whether any row draws from a part of its distribution.
        marks: Of each row of logits, see `kernels.sampling`; None where none is watermarked.
    """

    parameters: SamplingParameters
    positions: StagedArray
    may_truncate: bool
    marks: StagedArray | None = None

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
        """Draw one token a row, `INVALID_TOKEN` where the logits are not a distribution.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, of a vocabulary that may be divided
            slots, result: `[num_rows]` int64
        """
        marks = None if self.marks is None else self.marks.tensor
        positions, parameters = self.positions.tensor, self.parameters
        return vocabulary.draw(logits, slots, positions, parameters, may_truncate=self.may_truncate, marks=marks)


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < LEAST_TEMPERATURE


def _inverse_temperature(sampling: Sampling) -> float:
    return 0.0 if _is_greedy(sampling) else 1.0 / sampling.temperature


def _log_min_p(sampling: Sampling) -> float:
    return math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf


Context = tuple[int, ...]


class _Marked(Struct, gc=False):
    """A sequence with a watermark.

    Attributes:
        firsts: The contexts of its output, each with the place in the output of the token that it was first before.
        num_read: Places in the output whose contexts are among these.
    """

    sequence: BatchSequence
    key: bytes
    firsts: dict[Context, int]
    num_read: int = CONTEXT


class Watermarks:
    """Keeps the contexts of the sequence in each row that has a watermark, for marks from its key and last tokens.

    A mark depends on the output so far, so a sequence has to wait for its last token (`needs_last_token`), and on
    nothing else: not on the batch, the worker, the step, or whether a token was drafted. A context that the output has
    had already is not marked again; its token is drawn with the request's seed, as the first `CONTEXT` tokens are.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Marked] = {}

    def assign(self, row: int, sequence: BatchSequence) -> None:
        """Begin with a sequence that was given a row and has a watermark."""
        key = sequence.sampling.watermark
        assert key is not None
        self._rows[row] = _Marked(sequence, bytes.fromhex(key), {})

    def marks(self, sampled: SampledRows, places: Int64s) -> Int64s:
        """Return the marks of rows of logits, of which those at `places` have a watermark; 0 of the others."""
        marks = np.zeros(len(sampled.rows), dtype=np.int64)
        for place in places.tolist():
            path = () if sampled.paths is None else sampled.paths[place]
            marks[place] = _mark(self._rows[int(sampled.rows[place])], path)
        return marks


def _mark(marked: _Marked, path: Values[int]) -> int:
    """Return the mark of the token behind the known output and these drafts; 0 for none."""
    sequence, firsts = marked.sequence, marked.firsts
    token_ids, start = sequence.token_ids, sequence.num_prompt_tokens
    num_known = len(token_ids) - start
    for place in range(marked.num_read, num_known):
        firsts.setdefault(tuple(token_ids[start + place - CONTEXT : start + place]), place)
    marked.num_read = max(marked.num_read, num_known)
    place = num_known + len(path)
    if place < CONTEXT:
        return 0
    # Of the drafts' contexts too, the first counts: all that end behind the last known token.
    tail = (*token_ids[max(start, len(token_ids) - CONTEXT) :], *path)
    context = tail[-CONTEXT:]
    num_later = len(tail) - CONTEXT
    is_repeated = firsts.get(context, place) < place or any(
        tail[offset : offset + CONTEXT] == context for offset in range(num_later)
    )
    return 0 if is_repeated else mark_of(marked.key, context)


_TRUNCATION, _LOGPROBS, _WATERMARK, _NUM_BITS = 1, 2, 4, 3


@dataclass(slots=True)
class StagedSampling:
    """What the rows of a step ask of the sampler, on its way to the device."""

    slots: StagedArray
    draw: StagedDraw
    features: list[Adjust] = field(default_factory=list)
    logprobs: StagedLogprobs | None = None


class DrawnTokens(Struct, frozen=True, gc=False):
    """What rows of logits led to, on the device.

    Attributes:
        token_ids: `[num_rows]` int64, `INVALID_TOKEN` where the logits are not a distribution.
    """

    token_ids: torch.Tensor
    staged_logprobs: StagedLogprobs | None = None
    scores: TokenScores | None = None


class _SamplingRequests(Struct, frozen=True, gc=False):
    """What the rows of a step ask of the sampler; a step of the same rows asks for the same."""

    rows: bytes
    may_truncate: bool
    logprobs: Int64s | None
    watermarked: Int64s | None
    features: list[tuple[Feature, Int64s]]


class Sampler:
    """Owns the sampling state of each row of the batch."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._distributions = Distributions(num_rows, vocab_size, device)
        self._features = make_features(num_rows, vocab_size, device, vocabulary)
        self._logprobs = LogprobRows(num_rows, vocab_size, vocabulary)
        self._watermarks = Watermarks()
        # What each row asks for: the bits below, and above them one for each feature.
        self._asks = np.zeros(num_rows, dtype=np.int64)
        self._is_any_asking = False
        self._requests: _SamplingRequests | None = None

    def assign(self, newcomers: Values[BatchSequence], upload: Upload) -> None:
        """Keep what sequences ask for that were given a row."""
        rows = [sequence.row for sequence in newcomers]
        self._distributions.assign(rows, newcomers, upload)
        self._logprobs.assign(rows, newcomers)
        self._asks[rows] = [self._asked_by(sequence.sampling) for sequence in newcomers]
        for row, sequence in zip(rows, newcomers, strict=True):
            if sequence.sampling.watermark is not None:
                self._watermarks.assign(row, sequence)
        for bit, feature in enumerate(self._features, start=_NUM_BITS):
            for row, sequence in zip(rows, newcomers, strict=True):
                if feature.is_asked_by(sequence.sampling):
                    feature.assign(row, sequence, upload)
                    self._asks[row] |= 1 << bit
        # Rows of sequences that have ended count too: then a step looks at its rows.
        self._is_any_asking = bool(self._asks.any())
        self._requests = None

    def _asked_by(self, sampling: Sampling) -> int:
        asked = _TRUNCATION if self._distributions.is_truncated_by(sampling) else 0
        asked |= _LOGPROBS if sampling.logprobs is not None else 0
        return asked | (_WATERMARK if sampling.watermark is not None else 0)

    def stage(self, sampled: SampledRows, upload: Upload) -> StagedSampling:
        """Prepare to sample logits that belong to these rows, at least one."""
        if not self._is_any_asking:
            draw = self._distributions.stage(sampled, upload, may_truncate=False)
            return StagedSampling(upload.add(sampled.rows), draw)
        requests, marks = self._requests_of(sampled.rows), None
        if requests.watermarked is not None:
            marks = upload.add(self._watermarks.marks(sampled, requests.watermarked))
        draw = self._distributions.stage(sampled, upload, may_truncate=requests.may_truncate, marks=marks)
        staged = StagedSampling(upload.add(sampled.rows), draw)
        if requests.logprobs is not None:
            staged.logprobs = self._logprobs.stage(sampled, requests.logprobs, upload)
        for feature, places in requests.features:
            staged.features.append(feature.stage(sampled, places, upload))
        return staged

    def _requests_of(self, rows: Int64s) -> _SamplingRequests:
        """Return what these rows ask for. They are usually the rows of the step before."""
        key, requests = rows.tobytes(), self._requests
        if requests is None or requests.rows != key:
            asks = self._asks[rows]
            of_any = int(np.bitwise_or.reduce(asks))
            logprobs = _places(asks & _LOGPROBS) if of_any & _LOGPROBS else None
            watermarked = _places(asks & _WATERMARK) if of_any & _WATERMARK else None
            features = [
                (feature, _places(asks & 1 << bit))
                for bit, feature in enumerate(self._features, start=_NUM_BITS)
                if of_any >> bit & 1
            ]
            self._requests = requests = _SamplingRequests(
                key, bool(of_any & _TRUNCATION), logprobs, watermarked, features
            )
        return requests

    def sample(self, logits: torch.Tensor, staged: StagedSampling) -> DrawnTokens:
        """Draw a token for each row.

        Args:
            logits: Overwritten.
            staged: From `stage`, its upload sent.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous, of a vocabulary that may be divided
        """
        slots, logprobs = staged.slots.tensor, staged.logprobs
        kept = None if logprobs is None else logprobs.keep(logits)
        if staged.features:
            logits = self._vocabulary.widened(logits)
        for adjust in staged.features:
            adjust(logits)
        token_ids = staged.draw.draw(logits, slots, self._vocabulary)
        for adjust in staged.features:
            if isinstance(adjust, StagedPenalties):
                adjust.count(token_ids)
        if logprobs is None or kept is None:
            return DrawnTokens(token_ids)
        return DrawnTokens(token_ids, logprobs, logprobs.score(kept, token_ids))


def _places(asks: Int64s) -> Int64s:
    """Return where numbers are not zero; `np.flatnonzero` takes four times as long for a few."""
    return asks.nonzero()[0]
