"""Trains a student: for a number of steps, or for as long as the clock says.

Source: Muon for the matrices inside the layers (Jordan et al. 2024), AdamW for the rest, bfloat16 autocast.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from ops.train_draft.rows import Batch
from ops.train_draft.student import Student

_WARMUP = 0.02
_DECAY = 0.6
_MATRIX_RATE = 5e-3
_OTHER_RATE = 2e-3
_SMOOTHING = 0.95


@dataclass(frozen=True, slots=True)
class Length:
    """How long to train: the first of the two that is reached; at least one is not None."""

    steps: int | None
    seconds: float | None

    def fraction(self, step: int, seconds: float) -> float:
        """Return how much of the training is over, from 0 to 1."""
        by_steps = 0.0 if self.steps is None else step / self.steps
        return min(1.0, max(by_steps, 0.0 if self.seconds is None else seconds / self.seconds))


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What a step found.

    Attributes:
        fraction: How much of the training was over before it.
        loss: Running mean of the loss.
        num_tokens: Tokens of its batch.
    """

    fraction: float
    loss: float
    num_tokens: int


def train(student: Student, batches: Iterator[Batch], length: Length) -> Iterator[TrainingStep]:
    """Train for one step or more, reporting each. The learning rate has fallen to nothing when the last one is over."""
    optimizers = _optimizers(student.module)
    started = time.monotonic()
    mean, step = 0.0, 0
    while (fraction := length.fraction(step, time.monotonic() - started)) < 1 or step == 0:
        batch = next(batches)
        _set_rates(optimizers, fraction)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = student.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(student.module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.item() if step == 0 else _SMOOTHING * mean + (1 - _SMOOTHING) * loss.item()
        step += 1
        yield TrainingStep(fraction, mean, batch.token_ids.numel())


def _set_rates(optimizers: list[Optimizer], fraction: float) -> None:
    """Warm up, hold, fall to nothing."""
    scale = min(1.0, (fraction + 1e-3) / _WARMUP, (1.0 - fraction) / _DECAY)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale


def _optimizers(module: nn.Module) -> list[Optimizer]:
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and not _is_vocabulary(parameter, module)]
    chosen = set(map(id, matrices))
    others = [parameter for _, parameter in named if id(parameter) not in chosen]
    optimizers: list[Optimizer] = [Muon(matrices, lr=_MATRIX_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")]
    if others:
        optimizers.append(AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _is_vocabulary(parameter: torch.Tensor, module: nn.Module) -> bool:
    """Say whether a matrix has a row for each token: it is no linear layer of the network."""
    layers = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)}
    return id(parameter) not in layers
