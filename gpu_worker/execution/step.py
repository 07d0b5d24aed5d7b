"""A step that was submitted, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.core.step import LogprobEntry, SampledTokens, StepResult
from gpu_worker.execution.batch.transfers import Download, Downloads
from gpu_worker.execution.drafts.verification import Entries, accepted_tokens
from gpu_worker.execution.pooling import PooledRows
from gpu_worker.execution.sampling.logprobs import entries as entries_of
from gpu_worker.execution.sampling.prompt_logprobs import PromptChunk, chunk_entries
from gpu_worker.execution.sampling.sampler import DrawnTokens
from kernels.sampling import INVALID_TOKEN, TokenScores

_NOTHING_SAMPLED = SampledTokens()
_INVALID_LOGITS = str(InvalidLogitsError())


@dataclass(slots=True)
class StepOutputs:
    """What a step computes, on the device.

    Attributes:
        samples: For each scheduled sequence, whether it samples.
        drafts: Of each sequence that samples; None when the step verifies none.
    """

    samples: list[bool]
    drawn: list[DrawnTokens]
    chunks: list[tuple[PromptChunk, list[TokenScores]]]
    drafts: list[Draft] | None = None
    pooled: list[PooledRows] = field(default_factory=list)

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
        return [*tensors, *(rows.values for rows in self.pooled)]


class SubmittedStep:
    """The pending step of a runner."""

    def __init__(
        self,
        step: int,
        outputs: StepOutputs,
        downloads: Downloads,
        land: Callable[[list[SampledTokens]], None] | None = None,
    ) -> None:
        self._step = step
        self._outputs = outputs
        self._land = land
        self._download: Download = downloads.start(outputs.tensors())

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled, with an error where the logits were no distribution."""
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
        return StepResult(self._step, sampled)


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
    """Add what is reported of the prompt; where that is not a number, the sequence ends."""
    if any(entry.logprob != entry.logprob for entry in entries):
        return SampledTokens(error=_INVALID_LOGITS)
    return msgspec.structs.replace(tokens, prompt_logprobs=entries)


def _with_pooled(tokens: SampledTokens, values: npt.NDArray[np.float64]) -> SampledTokens:
    """Add what is contributed to an answer; where that is not a number, the sequence ends."""
    if not np.isfinite(values).all():
        return SampledTokens(error=_INVALID_LOGITS)
    return msgspec.structs.replace(tokens, pooled=values.tobytes())
