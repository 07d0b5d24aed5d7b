"""A step that was submitted to a device, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpu_worker.core.step import LogprobEntry, SampledTokens, StepResult
from gpu_worker.execution.logprobs import LogprobTensors
from gpu_worker.execution.prompt_logprobs import PromptChunk, chunk_entries
from gpu_worker.execution.token_choice import InvalidLogitsError
from gpu_worker.execution.transfers import Download, Downloads
from kernels.sampling import INVALID_TOKEN

_NOTHING_SAMPLED = SampledTokens()


@dataclass(slots=True)
class StepOutputs:
    """What a step computes, on the device.

    Attributes:
        samples: For each scheduled sequence, whether it samples.
        token_ids: `[num_sampled]` int64.
        logprob_places: Sampled tokens that report log probabilities.
        num_top: How many alternatives each of those reports.
        logprobs: Of those, or None.
        chunks: Parts of prompts whose log probabilities are wanted, with them.
    """

    samples: list[bool]
    token_ids: torch.Tensor
    logprob_places: tuple[int, ...]
    num_top: tuple[int, ...]
    logprobs: LogprobTensors | None
    chunks: list[tuple[PromptChunk, list[LogprobTensors]]]

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the order in which `DeviceStep` takes them up again."""
        groups = [] if self.logprobs is None else [self.logprobs]
        groups += [part for _, scores in self.chunks for part in scores]
        columns = [tensor for group in groups for tensor in (group.chosen, group.top_ids, group.top_values)]
        return [self.token_ids, *columns]


class DeviceStep:
    """The pending step of a device."""

    def __init__(self, step: int, outputs: StepOutputs, downloads: Downloads) -> None:
        """Start to copy the outputs of step number `step`."""
        self._step = step
        self._outputs = outputs
        self._download: Download = downloads.start(outputs.tensors())

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled.

        Raises:
            InvalidLogitsError: A row that was drawn from is no distribution.
        """
        outputs, tensors = self._outputs, iter(self._download.wait())
        token_ids: list[int] = next(tensors).tolist()
        if INVALID_TOKEN in token_ids:
            raise InvalidLogitsError
        drawn = [SampledTokens((token_id,)) for token_id in token_ids]
        if outputs.logprobs is not None:
            places = outputs.logprob_places
            entries = _next(tensors).entries([token_ids[place] for place in places], outputs.num_top)
            for place, entry in zip(places, entries, strict=True):
                drawn[place] = SampledTokens((token_ids[place],), (entry,))
        if len(drawn) == len(outputs.samples):
            sampled = drawn
        else:
            rest = iter(drawn)
            sampled = [next(rest) if samples else _NOTHING_SAMPLED for samples in outputs.samples]
        for chunk, scores in outputs.chunks:
            entries_of_chunk = chunk_entries(chunk, [_next(tensors) for _ in scores])
            sampled[chunk.place] = _with_prompt(sampled[chunk.place], entries_of_chunk)
        return StepResult(self._step, sampled)


def _next(tensors: Iterator[torch.Tensor]) -> LogprobTensors:
    return LogprobTensors(next(tensors), next(tensors), next(tensors))


def _with_prompt(tokens: SampledTokens, entries: tuple[LogprobEntry, ...]) -> SampledTokens:
    return SampledTokens(tokens.token_ids, tokens.logprobs, entries)
