"""From logits to tokens, for all rows of a batch together; parameters that no row uses cost nothing.

Order: log probabilities are taken from the model's own logits; then `logit_bias`, penalties, and for rows that are not
greedy temperature, `min_p`, `top_k`, `top_p`, and one draw with the uniform number of (seed, position in the output).
"""

from __future__ import annotations

import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SampledTokens
from gpu_worker.execution.logprobs import Logprobs
from gpu_worker.execution.penalties import apply_penalties
from gpu_worker.execution.sampling_batch import RandomRows, SamplingBatch
from gpu_worker.execution.token_choice import choose, choose_truncated


class Sampler:
    """Keeps the description of the last batch, and makes a new one when other sequences come to sample."""

    def __init__(self, device: torch.device) -> None:
        """Sample logits that live on `device`."""
        self._device = device
        self._batch: SamplingBatch | None = None

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledTokens]:
        """Choose the next token of each sequence.

        Args:
            logits: Overwritten.
            sequences: One a row.

        Shapes:
            logits: `[num_rows, vocab_size]` float32, contiguous

        Raises:
            InvalidLogitsError: A row that is drawn from holds NaN.
        """
        batch = self._batch
        if batch is None or batch.sequences != sequences:
            batch = self._batch = SamplingBatch(sequences, logits.shape[1], self._device, batch)
        logprobs = Logprobs(logits[batch.with_logprobs]) if batch.with_logprobs else None
        _adjust(logits, batch)
        token_ids = _choose(logits, batch).tolist()
        if logprobs is None:
            return [SampledTokens((token_id,)) for token_id in token_ids]
        entries = logprobs.entries([token_ids[row] for row in batch.with_logprobs], batch.num_top)
        reported: dict[int, tuple[LogprobEntry, ...]] = {
            row: (entry,) for row, entry in zip(batch.with_logprobs, entries, strict=True)
        }
        return [SampledTokens((token_id,), reported.get(row, ())) for row, token_id in enumerate(token_ids)]


def _adjust(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Apply bias and penalties in place."""
    if batch.bias_index is not None and batch.bias is not None:
        logits.view(-1).index_add_(0, batch.bias_index, batch.bias)
    if batch.penalised:
        counts = [counts for state in batch.rows if (counts := state.counts) is not None]
        for row, count in zip(batch.penalised, counts, strict=True):
            count.update(batch.sequences[row].token_ids)
        apply_penalties(logits, batch.penalised, counts)


def _choose(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    if batch.num_greedy == len(batch.sequences):
        return logits.argmax(dim=-1)
    groups = [group for group in (batch.free, batch.truncated) if group is not None]
    if len(groups) == 1 and groups[0].index is None:
        return _draw(logits, batch, groups[0])
    chosen = logits.argmax(dim=-1) if batch.num_greedy else logits.new_empty(len(logits), dtype=torch.int64)
    for group in groups:
        chosen[group.index] = _draw(logits[group.index], batch, group)
    return chosen


def _draw(logits: torch.Tensor, batch: SamplingBatch, group: RandomRows) -> torch.Tensor:
    """Draw the tokens of a group, whose logits are given."""
    numbers = [batch.rows[row].uniforms.at(batch.sequences[row].num_output_tokens) for row in group.rows]
    uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).mul_(group.inverse_temperature)
    if group is batch.truncated:
        return choose_truncated(scaled, uniform, group.truncation)
    return choose(scaled, uniform, group.truncation.log_min_p if group.uses_min_p else None)
