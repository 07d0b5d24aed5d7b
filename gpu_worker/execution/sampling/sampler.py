"""From logits to tokens, for all rows of a batch together; parameters that no row uses cost nothing.

Order: log probabilities are taken from the model's own logits; then `logit_bias`, penalties, and for rows that are not
greedy temperature, `min_p`, `top_k`, `top_p`, and one draw with the uniform number of (seed, position in the output).
"""

from __future__ import annotations

from collections.abc import Sequence as Values

import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SampledTokens
from gpu_worker.execution.drafts.verification import accepted_tokens
from gpu_worker.execution.sampling.logprobs import Logprobs
from gpu_worker.execution.sampling.penalties import apply_penalties
from gpu_worker.execution.sampling.sampling_batch import RandomRows, SamplingBatch
from gpu_worker.execution.sampling.token_choice import choose, choose_truncated


class Sampler:
    """Keeps the description of the last batch, and makes a new one when other sequences come to sample."""

    def __init__(self, device: torch.device) -> None:
        """Sample logits that live on `device`."""
        self._device = device
        self._batch: SamplingBatch | None = None

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledTokens]:
        """Choose the next token of each sequence.

        Args:
            logits: Overwritten. One row a sequence.
            sequences: Those that sample.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous

        Raises:
            InvalidLogitsError: A row that is drawn from holds NaN.
        """
        token_ids, reported = self._sample_rows(logits, sequences, None)
        return [SampledTokens((token_id,), reported.get(row, ())) for row, token_id in enumerate(token_ids)]

    def verify(
        self, logits: torch.Tensor, sequences: list[Sequence], drafts: Values[Draft]
    ) -> tuple[list[SampledTokens], list[tuple[int, ...]]]:
        """Choose as many tokens of each sequence as its draft was right, and one more.

        Every row is sampled as a step of its own would sample it at that place of the output, given the guesses before
        it. So a guess is accepted with the probability that it has, the token that differs is a sample of what remains,
        and tokens do not depend on what was drafted.

        Args:
            logits: Overwritten. The rows of each sequence's draft.
            sequences: Those that sample.
            drafts: Those of each sequence.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous

        Returns:
            The tokens, and the numbers of the guesses that were right.

        Raises:
            InvalidLogitsError: A row that is drawn from holds NaN.

        Source: Leviathan et al., "Fast inference from transformers via speculative decoding" (arXiv 2211.17192),
        theorem 1, with each proposal taken as certain.
        """
        rows = [sequence for sequence, draft in zip(sequences, drafts, strict=True) for _ in range(len(draft) + 1)]
        ahead = [path for draft in drafts for path in draft.paths()]
        token_ids, reported = self._sample_rows(logits, rows, ahead)
        sampled = accepted_tokens(drafts, token_ids, reported)
        return sampled, [tokens.accepted for tokens in sampled]

    def _sample_rows(
        self, logits: torch.Tensor, sequences: list[Sequence], ahead: list[tuple[int, ...]] | None
    ) -> tuple[list[int], dict[int, tuple[LogprobEntry, ...]]]:
        """Choose one token a row; return them, and the log probabilities of the rows that report them."""
        batch = self._batch
        if batch is None or ahead is not None or batch.ahead is not None or batch.sequences != sequences:
            batch = self._batch = SamplingBatch(sequences, logits.shape[1], self._device, batch, ahead)
        logprobs = Logprobs(logits[batch.with_logprobs]) if batch.with_logprobs else None
        _adjust(logits, batch)
        token_ids: list[int] = _choose(logits, batch).tolist()
        if logprobs is None:
            return token_ids, {}
        entries = logprobs.entries([token_ids[row] for row in batch.with_logprobs], batch.num_top)
        return token_ids, {row: (entry,) for row, entry in zip(batch.with_logprobs, entries, strict=True)}


def _adjust(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Apply bias and penalties in place."""
    if batch.bias_index is not None and batch.bias is not None:
        logits.view(-1).index_add_(0, batch.bias_index, batch.bias)
    if batch.penalised:
        counted = []
        for row in batch.penalised:
            counts = batch.rows[row].counts
            assert counts is not None
            counts.update(batch.sequences[row].token_ids)
            counted.append(counts.counted(batch.drafts_before(row)))
        apply_penalties(logits, batch.penalised, counted)


def _choose(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    if batch.num_greedy == len(batch.sequences):
        return _likeliest(logits)
    groups = [group for group in (batch.free, batch.truncated) if group is not None]
    if len(groups) == 1 and groups[0].index is None:
        return _draw(logits, batch, groups[0])
    chosen = _likeliest(logits) if batch.num_greedy else logits.new_empty(len(logits), dtype=torch.int64)
    for group in groups:
        chosen[group.index] = _draw(logits[group.index], batch, group)
    return chosen


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the place of the largest logit of each row; on a CPU NumPy finds it seven times as fast as torch."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _draw(logits: torch.Tensor, batch: SamplingBatch, group: RandomRows) -> torch.Tensor:
    """Draw the tokens of a group, whose logits are given."""
    positions = [batch.sequences[row].num_output_tokens + len(batch.drafts_before(row)) for row in group.rows]
    numbers = [batch.rows[row].uniforms.at(position) for row, position in zip(group.rows, positions, strict=True)]
    uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).mul_(group.inverse_temperature)
    if group is batch.truncated:
        return choose_truncated(scaled, uniform, group.truncation)
    return choose(scaled, uniform, group.truncation.log_min_p if group.uses_min_p else None)
