"""Runs the sampler on made-up logits, over rows of the batch that sequences keep; and its semantics in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens
from gpu_worker.execution.batch.assembled_step import SampledRows, rows_behind_drafts
from gpu_worker.execution.batch.transfers import Downloads, Upload
from gpu_worker.execution.sampling.sampler import Sampler
from gpu_worker.execution.step import StepOutputs, SubmittedStep
from gpu_worker.layers.vocabulary import Vocabulary
from shared.sampling import Sampling
from tests.gpu_worker.plans import batch_sequence

NUM_ROWS = 513


class SamplerRun:
    """A sampler and the rows that it has given to sequences. Several runs may sample for one sequence."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.sampler = Sampler(NUM_ROWS, vocab_size, self.device, Vocabulary())
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(NUM_ROWS - 2, -1, -1))

    def sample(self, logits: torch.Tensor, sequences: Values[Sequence]) -> list[SampledTokens]:
        """Choose the next token of each sequence."""
        rows = self._place(sequences)
        positions = np.array([sequence.num_output_tokens for sequence in sequences])
        return self._sample(logits, SampledRows(np.arange(len(rows)), rows, positions), None)

    def leave(self, sequence: Sequence) -> None:
        """Give a sequence's row to the next one."""
        self._free.append(self._rows.pop(sequence))

    def verify(self, logits: torch.Tensor, sequences: Values[Sequence], drafts: list[Draft]) -> list[SampledTokens]:
        """Choose as many tokens of each sequence as its draft was right, and one more."""
        rows = self._place(sequences)
        last = np.cumsum([len(draft) + 1 for draft in drafts]) - 1
        positions = np.array([sequence.num_output_tokens for sequence in sequences])
        return self._sample(logits, rows_behind_drafts(last, rows, positions, drafts), drafts)

    def _place(self, sequences: Values[Sequence]) -> np.ndarray:
        newcomers = []
        for sequence in sequences:
            if sequence not in self._rows:
                self._rows[sequence] = self._free.pop()
                newcomers.append(batch_sequence(sequence, self._rows[sequence]))
        upload = Upload(self.device)
        self.sampler.assign(newcomers, upload)
        upload.send()
        return np.array([self._rows[sequence] for sequence in sequences])

    @torch.inference_mode()
    def _sample(self, logits: torch.Tensor, sampled: SampledRows, drafts: list[Draft] | None) -> list[SampledTokens]:
        upload = Upload(self.device)
        staged = self.sampler.stage(sampled, upload)
        upload.send()
        drawn = self.sampler.sample(logits.to(self.device, copy=True), staged)
        count = len(sampled.rows) if drafts is None else len(drafts)
        outputs = StepOutputs([True] * count, [drawn], [], drafts)
        step: Any = SimpleNamespace(plan=SimpleNamespace(step=0), scores=None)
        return SubmittedStep(step, outputs, Downloads(self.device)).result().sampled


def adjusted_logits(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Apply bias and penalties."""
    result = []
    for token_id, logit in enumerate(logits):
        logit += sampling.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.frequency_penalty * output.count(token_id)
        logit -= sampling.presence_penalty * (token_id in output)
        result.append(logit)
    return result


def distribution(logits: list[float], sampling: Sampling) -> list[float]:
    """Probability of each token."""
    if sampling.temperature == 0:
        return [float(logit == max(logits)) for logit in logits]
    probabilities = _normalised([math.exp((logit - max(logits)) / sampling.temperature) for logit in logits])
    least = sampling.min_p * max(probabilities)
    probabilities = _normalised([p if p >= least else 0.0 for p in probabilities])
    if sampling.top_k > 0:
        least = sorted(probabilities, reverse=True)[: sampling.top_k][-1]
        probabilities = _normalised([p if p >= least else 0.0 for p in probabilities])
    kept, before = set(), 0.0
    for token_id in sorted(range(len(logits)), key=lambda t: -probabilities[t]):
        if before < sampling.top_p or not kept:
            kept.add(token_id)
        before += probabilities[token_id]
    return _normalised([p if token_id in kept else 0.0 for token_id, p in enumerate(probabilities)])


def _normalised(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def forbidden_tokens(
    sampling: Sampling, output: list[int], end_ids: set[int], bad_words: list[tuple[int, ...]], vocab_size: int
) -> set[int]:
    """Return the tokens that may not follow an output."""
    forbidden: set[int] = set()
    if sampling.allowed_token_ids is not None:
        forbidden |= set(range(vocab_size)) - set(sampling.allowed_token_ids)
    for word in bad_words:
        if [*word[:-1]] == output[len(output) - len(word) + 1 :] or len(word) == 1:
            forbidden.add(word[-1])
    if len(output) < sampling.min_tokens and forbidden | end_ids != set(range(vocab_size)):
        forbidden |= end_ids
    return forbidden
