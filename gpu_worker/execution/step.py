"""From a step's hidden vectors to what it gives, and what becomes of a step that was submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.core.step import LogprobEntry, SampledTokens, StepResult
from gpu_worker.execution.batch.assembled_step import AssembledStep, attention_of
from gpu_worker.execution.batch.graph_shapes import MAX_VERIFIED_ROWS
from gpu_worker.execution.batch.graphs import ComputedRows
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.transfers import Download, Downloads, StagedArray, Upload
from gpu_worker.execution.drafts.drafting import Entries, accepted_tokens
from gpu_worker.execution.pooling import PooledChunk, PooledRows, pool, pooled_chunks
from gpu_worker.execution.sampling.grammar_mask import StagedGrammarMask
from gpu_worker.execution.sampling.logprobs import PromptChunk, chunk_entries, prompt_chunks, score_chunk
from gpu_worker.execution.sampling.logprobs import entries as entries_of
from gpu_worker.execution.sampling.sampler import DrawnTokens, Sampler, StagedSampling
from gpu_worker.models.decoder import CausalLM
from kernels.sampling import INVALID_TOKEN, TokenScores

_NOTHING_SAMPLED = SampledTokens()
_INVALID_LOGITS = str(InvalidLogitsError())


@dataclass(slots=True)
class StepOutputs:
    """What a step computes, on the device.

    Attributes:
        samples: For each scheduled sequence, whether it samples.
        drafts: Of each sequence that samples; None when the step verifies none.
        attention: Of each group of `StagedScores.groups`, what its tokens attend to.
    """

    samples: list[bool]
    drawn: list[DrawnTokens]
    chunks: list[tuple[PromptChunk, list[TokenScores]]]
    drafts: list[Draft] | None = None
    pooled: list[PooledRows] = field(default_factory=list)
    attention: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the order in which `SubmittedStep` unpacks them."""
        tensors: list[torch.Tensor] = []
        for drawn in self.drawn:
            tensors.append(drawn.token_ids)
            if drawn.scores is not None:
                tensors += _columns(drawn.scores)
        for _, scores in self.chunks:
            for part in scores:
                tensors += _columns(part)
        return [*tensors, *map(attrgetter("values"), self.pooled), *self.attention]


class SubmittedStep:
    """The pending step of a runner."""

    def __init__(
        self,
        step: AssembledStep,
        outputs: StepOutputs,
        downloads: Downloads,
        land: Callable[[list[SampledTokens]], None] | None = None,
    ) -> None:
        self._step = step
        self._outputs = outputs
        self._land = land
        self._download: Download = downloads.start(outputs.tensors())

    def result(self) -> StepResult:
        """Wait for the step and return the sampled tokens, with an error where the logits were no distribution."""
        outputs, tensors = self._outputs, iter(self._download.wait())
        token_ids, entries = _unpack_drawn(outputs.drawn, tensors)
        if outputs.drafts is None:
            sampled = [SampledTokens((token_id,)) for token_id in token_ids]
            for row, entry in entries.items():
                sampled[row] = SampledTokens((token_ids[row],), entry)
        else:
            sampled = accepted_tokens(outputs.drafts, token_ids, entries)
        if INVALID_TOKEN in token_ids:
            sampled = [_replace_invalid(tokens) for tokens in sampled]
        if len(sampled) < len(outputs.samples):
            rest = iter(sampled)
            sampled = [next(rest) if samples else _NOTHING_SAMPLED for samples in outputs.samples]
        for chunk, scores in outputs.chunks:
            entries_of_chunk = chunk_entries(chunk, [_next(tensors) for _ in scores])
            sampled[chunk.place] = _with_prompt(sampled[chunk.place], entries_of_chunk)
        for rows in outputs.pooled:
            for place, values in zip(rows.places, next(tensors).numpy(), strict=True):
                sampled[place] = _with_pooled(sampled[place], values)
        if self._land is not None:
            self._land(sampled)
        attention = []
        if (asked := self._step.scores) is not None:
            attention = attention_of(asked.groups, tensors, sampled, self._step.drafts)
        return StepResult(self._step.plan.step, sampled, attention)


def _unpack_drawn(drawn: list[DrawnTokens], tensors: Iterator[torch.Tensor]) -> tuple[list[int], Entries]:
    token_ids: list[int] = []
    entries: Entries = {}
    for part in drawn:
        first, new = len(token_ids), next(tensors).tolist()
        token_ids += new
        if (staged := part.staged_logprobs) is not None:
            reported = entries_of(_next(tensors), [new[place] for place in staged.places], staged.num_reported())
            entries |= {first + place: (entry,) for place, entry in zip(staged.places, reported, strict=True)}
    return token_ids, entries


def _replace_invalid(tokens: SampledTokens) -> SampledTokens:
    """Replace an invalid token, which is always the last one, by an error: nothing behind a rejected draft is kept."""
    if tokens.token_ids[-1] != INVALID_TOKEN:
        return tokens
    valid = tokens.token_ids[:-1]
    logprobs = tokens.logprobs[: len(valid)]
    return msgspec.structs.replace(tokens, token_ids=valid, logprobs=logprobs, error=_INVALID_LOGITS)


def _columns(group: TokenScores) -> list[torch.Tensor]:
    return [group.chosen, group.top_ids, group.top_values]


def _next(tensors: Iterator[torch.Tensor]) -> TokenScores:
    return TokenScores(next(tensors), next(tensors), next(tensors))


def _with_prompt(tokens: SampledTokens, entries: tuple[LogprobEntry, ...]) -> SampledTokens:
    """Add the prompt's log probabilities; if one is NaN, the sequence ends."""
    if any(entry.logprob != entry.logprob for entry in entries):
        return SampledTokens(error=_INVALID_LOGITS)
    return msgspec.structs.replace(tokens, prompt_logprobs=entries)


def _with_pooled(tokens: SampledTokens, values: npt.NDArray[np.float64]) -> SampledTokens:
    """Add the step's contribution to a pooled answer; if it is not finite, the sequence ends."""
    if not np.isfinite(values).all():
        return SampledTokens(error=_INVALID_LOGITS)
    return msgspec.structs.replace(tokens, pooled=values.tobytes())


class _Tile(Struct, frozen=True, gc=False):
    """Rows that are sampled at once, on their way to the device; `tokens` is None where they are all there are."""

    sampling: StagedSampling
    tokens: StagedArray | None


class StagedHead(Struct, frozen=True, gc=False):
    """Inputs for the work on a step's hidden vectors, on their way to the device."""

    tiles: list[_Tile]
    chunks: list[tuple[PromptChunk, StagedArray]]
    pooled: list[PooledChunk]

    def share_masks(self) -> None:
        """Let those who draw tokens know what only one who does not may know: the masks of grammars."""
        for feature in (feature for tile in self.tiles for feature in tile.sampling.features):
            if isinstance(feature, StagedGrammarMask):
                feature.shared()


class StepHead:
    """Computes on the model's device.

    Attributes:
        last_tokens: `[num_rows]` int64, the token drawn last for each row, where the device keeps it.
    """

    def __init__(self, model: CausalLM, sampler: Sampler, rows: BatchRows, *, keeps_last_tokens: bool) -> None:
        self._model = model
        self._sampler = sampler
        # With drafts there are more rows than sequences; what their logits take must not grow with it.
        self._max_tile_rows = max(rows.spare, MAX_VERIFIED_ROWS)
        self._keeps_last_tokens = keeps_last_tokens
        self.last_tokens = torch.zeros(rows.num_rows, dtype=torch.int64, device=model.device)

    def stage(self, step: AssembledStep, upload: Upload) -> StagedHead:
        """Prepare what follows the hidden vectors of any step."""
        num_tokens = len(step.layout.token_ids)
        tiles = [
            _Tile(self._sampler.stage(tile, upload), None if len(tile.rows) == num_tokens else upload.add(tile.tokens))
            for tile in step.sampled_rows().tiles(self._max_tile_rows)
        ]
        if step.is_decode:
            return StagedHead(tiles, [], [])
        chunks = prompt_chunks(step.shares, step.layout.query_starts)
        targets = [upload.add(np.array(chunk.targets, dtype=np.int64)) for chunk in chunks]
        pooled = pooled_chunks(step.shares, step.layout.query_starts)
        return StagedHead(tiles, list(zip(chunks, targets, strict=True)), pooled)

    def outputs(self, step: AssembledStep, staged: StagedHead, computed: ComputedRows) -> StepOutputs:
        """Compute the step's outputs from its launched rows, after the upload. Logits are overwritten."""
        hidden, drawn = computed.hidden, []
        for tile in staged.tiles:
            logits = computed.logits
            if logits is None:
                rows = hidden if tile.tokens is None else hidden.index_select(0, tile.tokens.tensor)
                adapters = step.adapters
                if adapters is not None and tile.tokens is not None:
                    adapters = adapters.of(tile.tokens.array)
                logits = self._model.logits(rows, adapters)
            drawn.append(self._draw(step, logits, tile.sampling))
        if step.is_decode:
            return StepOutputs(step.samples, drawn, [], step.sampling_drafts)
        scores = [
            (chunk, score_chunk(self._model, hidden, chunk, targets.tensor, step.adapters))
            for chunk, targets in staged.chunks
        ]
        pooled = pool(self._model, hidden, staged.pooled, step.adapters)
        return StepOutputs(step.samples, drawn, scores, step.sampling_drafts, pooled)

    def _draw(self, step: AssembledStep, logits: torch.Tensor, staged: StagedSampling) -> DrawnTokens:
        """Sample; where the next step may be launched before the host knows the tokens, keep them."""
        drawn = self._sampler.sample(logits, staged)
        if self._keeps_last_tokens and step.drafts is None:
            self.last_tokens.index_copy_(0, staged.slots.tensor, drawn.token_ids)
        return drawn
