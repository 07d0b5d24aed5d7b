"""What a batch of sequences asks of the sampler, as tensors. Made when the batch's membership changes, not every step.

Everything here follows from prompt, output and parameters of each sequence alone, so it can be made anew at any time:
after a preemption, or on another worker.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.sampling.penalties import TokenCounts, has_penalties
from gpu_worker.execution.sampling.philox import UniformStream
from gpu_worker.execution.sampling.token_choice import Truncation

# Below this, differences of logits overflow when divided by it; the most likely token takes all.
GREEDY_BELOW_TEMPERATURE = 1e-5


class TokenBias:
    """A `logit_bias` as arrays, because a dictionary is slow to read anew for each batch.

    Attributes:
        token_ids: `[num_tokens]` int64.
        values: `[num_tokens]` float32, what is added to each logit.
    """

    __slots__ = ("token_ids", "values")

    def __init__(self, logit_bias: dict[int, float]) -> None:
        """Read the entries."""
        self.token_ids = np.fromiter(logit_bias.keys(), dtype=np.int64, count=len(logit_bias))
        self.values = np.fromiter(logit_bias.values(), dtype=np.float32, count=len(logit_bias))


class SamplingRow:
    """State of one sequence that is worth keeping while other sequences come and go."""

    __slots__ = ("bias", "counts", "uniforms")

    def __init__(self, sequence: Sequence) -> None:
        """Start with nothing computed."""
        self.uniforms = UniformStream(sequence.sampling.seed)
        self.counts = TokenCounts(sequence) if has_penalties(sequence.sampling) else None
        self.bias = TokenBias(sequence.sampling.logit_bias) if sequence.sampling.logit_bias else None


class RandomRows:
    """The rows of a batch that are drawn the same way: with or without truncation by rank.

    Attributes:
        rows: Their places in the batch.
        index: The same as a tensor, or None when they are all rows of the batch.
        inverse_temperature: `[num_rows, 1]`.
        truncation: `[num_rows, 1]` each.
        uses_min_p: Whether any row does.
    """

    __slots__ = ("index", "inverse_temperature", "rows", "truncation", "uses_min_p")

    def __init__(self, sequences: list[Sequence], rows: list[int], device: torch.device) -> None:
        """Describe `rows` of the batch `sequences`."""

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        samplings = [sequences[row].sampling for row in rows]
        self.rows = rows
        self.index = None if len(rows) == len(sequences) else torch.tensor(rows, dtype=torch.int64, device=device)
        self.inverse_temperature = column([1.0 / sampling.temperature for sampling in samplings])
        self.uses_min_p = any(sampling.min_p > 0 for sampling in samplings)
        self.truncation = Truncation(
            column([math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf for sampling in samplings]),
            torch.tensor([sampling.top_k for sampling in samplings], dtype=torch.int64, device=device)[:, None],
            column([sampling.top_p for sampling in samplings]),
        )


class SamplingBatch:
    """The sequences of a batch, sorted by what they need.

    A sequence has several rows, one behind the other, when drafts are verified: row `j` is what follows `j` drafts.

    Attributes:
        sequences: The sequence of each row.
        ahead: The drafts that each row takes for granted, or None when there are none.
        rows: State of each row's sequence, kept from batch to batch.
        num_greedy: How many take the most likely token.
        free: Rows drawn from the whole vocabulary, or None.
        truncated: Rows with `top_k` or `top_p`, or None.
        penalised: Rows with penalties.
        with_logprobs: Rows that report log probabilities.
        num_top: How many alternatives each of those reports.
        bias_index: Flat indices into the logits that a `logit_bias` changes, or None.
        bias: What it adds.
    """

    __slots__ = (
        "ahead",
        "bias",
        "bias_index",
        "free",
        "num_greedy",
        "num_top",
        "penalised",
        "rows",
        "sequences",
        "truncated",
        "with_logprobs",
    )
    sequences: list[Sequence]
    ahead: list[tuple[int, ...]] | None
    rows: list[SamplingRow]

    def __init__(
        self,
        sequences: list[Sequence],
        vocab_size: int,
        device: torch.device,
        previous: SamplingBatch | None,
        ahead: list[tuple[int, ...]] | None = None,
    ) -> None:
        """Describe the batch `sequences`, taking over state from the batch before."""
        known = dict(zip(previous.sequences, previous.rows, strict=True)) if previous else {}
        for sequence in sequences:
            if sequence not in known:
                known[sequence] = SamplingRow(sequence)
        self.sequences = list(sequences)
        self.ahead = ahead
        self.rows = [known[sequence] for sequence in sequences]
        free: list[int] = []
        truncated: list[int] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            if sampling.temperature >= GREEDY_BELOW_TEMPERATURE:
                (truncated if sampling.top_k > 0 or sampling.top_p < 1.0 else free).append(row)
        self.num_greedy = len(sequences) - len(free) - len(truncated)
        self.free = RandomRows(sequences, free, device) if free else None
        self.truncated = RandomRows(sequences, truncated, device) if truncated else None
        self.penalised = [row for row, state in enumerate(self.rows) if state.counts is not None]
        self.with_logprobs = [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
        self.num_top = [sequences[row].sampling.logprobs or 0 for row in self.with_logprobs]
        self.bias_index, self.bias = _flat_bias(self.rows, vocab_size, device)

    def drafts_before(self, row: int) -> tuple[int, ...]:
        """Return the drafts that a row takes for granted."""
        return self.ahead[row] if self.ahead else ()


def _flat_bias(
    rows: list[SamplingRow], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Lay all `logit_bias` entries end to end. Ids outside the vocabulary name no token and are left out."""
    biased = [(row, state.bias) for row, state in enumerate(rows) if state.bias is not None]
    if not biased:
        return None, None
    sizes = [len(bias.token_ids) for _, bias in biased]
    token_ids = np.concatenate([bias.token_ids for _, bias in biased])
    values = np.concatenate([bias.values for _, bias in biased])
    indices = np.repeat(np.array([row for row, _ in biased], dtype=np.int64) * vocab_size, sizes) + token_ids
    is_token = token_ids < vocab_size
    return torch.from_numpy(indices[is_token]).to(device), torch.from_numpy(values[is_token]).to(device)
