"""Rows of logits and parameters for the implementations of sampling, which must all draw the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

from kernels.sampling.parameters import PenaltyTable, SamplingParameters
from shared.sampling import Sampling

Table = TypeVar("Table", SamplingParameters, PenaltyTable)
SAMPLINGS = [
    Sampling(temperature=0.0), Sampling(seed=1), Sampling(seed=-2, temperature=0.3),
    Sampling(seed=2**63 - 1, min_p=0.2), Sampling(seed=4, top_k=3), Sampling(seed=5, top_k=300),
    Sampling(seed=6, top_p=0.9), Sampling(seed=7, top_p=0.0),
    Sampling(seed=8, top_k=5, top_p=0.8, temperature=1.7),
    Sampling(seed=9, top_k=400, top_p=0.95, min_p=0.01),
    Sampling(seed=10, min_p=0.001, top_p=0.7), Sampling(seed=11, top_k=5000),
    # At the bounds of what messages allow.
    Sampling(seed=-(2**63), temperature=1e-5),
    Sampling(seed=12, temperature=2.0, top_p=0.999999),
    Sampling(seed=13, temperature=2.0, top_k=1, min_p=1.0),
    Sampling(seed=14, min_p=1.0), Sampling(seed=15, min_p=1e-38, top_p=1e-38),
    Sampling(seed=16, top_k=2**31 - 1, top_p=0.5),
]  # fmt: skip


@dataclass(slots=True)
class SamplingCase:
    """Arguments of `sample_tokens`."""

    logits: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    parameters: SamplingParameters
    penalties: PenaltyTable | None = None
    drafts: torch.Tensor | None = None

    def to(self, device: torch.device) -> SamplingCase:
        """Return a copy of everything; strides of the logits are kept."""
        padded = torch.full((len(self.logits), self.logits.shape[1] + 3), float("nan"), device=device)
        return SamplingCase(
            padded[:, : self.logits.shape[1]].copy_(self.logits),
            self.slots.to(device),
            self.positions.to(device),
            copied(self.parameters, device),
            None if self.penalties is None else copied(self.penalties, device),
            None if self.drafts is None else self.drafts.to(device),
        )


def copied(table: Table, device: torch.device) -> Table:
    """Copy all columns."""
    return type(table)(*(column.to(device, copy=True) for column in table))


def make_case(samplings: list[Sampling], logits: torch.Tensor, first_position: int = 2**33) -> SamplingCase:
    """Give row i a slot of its own; slots that no row names hold NaN or nonsense."""
    num_rows = len(samplings)
    slots = torch.randperm(num_rows + 4, generator=torch.Generator().manual_seed(3))[:num_rows]
    positions = torch.arange(first_position, first_position + num_rows)
    return SamplingCase(logits, slots, positions, make_parameters(samplings, slots))


def make_parameters(samplings: list[Sampling], slots: torch.Tensor) -> SamplingParameters:
    """Put row i into `slots[i]`."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        table = torch.full((int(slots.max()) + 3,), float("nan") if dtype.is_floating_point else -77, dtype=dtype)
        table[slots] = torch.tensor(values, dtype=dtype)
        return table

    return SamplingParameters(
        column([0.0 if s.temperature == 0 else 1.0 / s.temperature for s in samplings], torch.float32),
        column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], torch.float32),
        column([s.top_k for s in samplings], torch.int32),
        column([s.top_p for s in samplings], torch.float32),
        column([s.seed for s in samplings], torch.int64),
    )


def make_logits(num_rows: int, vocab_size: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Return logits that are `flat`, `peaked` as those of a model, `tied` as those of a bf16 head, or half `masked`."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        return logits * 4
    if kind == "masked":
        logits[:, 1::2] = float("-inf")
    return logits.bfloat16().float() if kind == "tied" else logits


def make_penalties(slots: torch.Tensor, vocab_size: int) -> PenaltyTable:
    """Return penalties of every kind, in turn."""
    generator = torch.Generator().manual_seed(0)
    num_slots = int(slots.max()) + 2
    bits = torch.randint(-(2**31), 2**31, (num_slots, -(-vocab_size // 32)), generator=generator).int()
    token_ids = torch.arange(vocab_size)
    is_seen = (bits[:, token_ids // 32] >> (token_ids % 32)) & 1 > 0
    counts = torch.randint(0, 4, (num_slots, vocab_size), generator=generator, dtype=torch.int32) // 2
    counts[~is_seen] = 0
    kinds = torch.tensor([[1.7, 0.3, -0.2], [1.0, 0.0, 0.0], [0.6, -0.7, 1.1], [1.0, 0.4, 0.0], [10.0, 2.0, 2.0]])
    repetition, frequency, presence = kinds[torch.arange(num_slots) % len(kinds)].T.contiguous()
    return PenaltyTable(repetition, frequency, presence, counts, bits)
