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
    optimization = Optimization(student.module, _OTHER_RATE, decay=0.01)
    started = time.monotonic()
    while True:
        fraction = length.fraction(optimization.num_steps, time.monotonic() - started)
        if fraction >= 1 and optimization.num_steps:
            return
        batch = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = student.loss(batch)
        # Warm up, hold, fall to nothing.
        optimization.step(loss, min(1.0, (fraction + 1e-3) / _WARMUP, (1.0 - fraction) / _DECAY))
        yield TrainingStep(fraction, optimization.mean_loss, batch.token_ids.numel())


class Optimization:
    """Owns the optimizers of a network: Muon for the matrices of its linear layers, AdamW for the rest.

    Attributes:
        num_steps: Steps taken.
        mean_loss: Running mean of the loss; not a number before the first step.
    """

    def __init__(self, module: nn.Module, other_rate: float, *, decay: float) -> None:
        """Begin without steps.

        Args:
            module: The network.
            other_rate: Peak learning rate of all parameters but the matrices of linear layers.
            decay: Weight decay of these matrices.
        """
        self._module = module
        self.num_steps = 0
        self.mean_loss = float("nan")
        layers = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)}
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in parameters if id(parameter) in layers]
        others = [parameter for parameter in parameters if id(parameter) not in layers]
        self._optimizers: list[Optimizer] = [
            Muon(matrices, lr=_MATRIX_RATE, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            self._optimizers.append(AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
        self._peak_rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]

    def step(self, loss: torch.Tensor, scale: float) -> None:
        """Take a step, with learning rates of `scale` times their peaks."""
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for optimizer, rate in zip(self._optimizers, self._peak_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
        kept = _SMOOTHING if self.num_steps else 0.0
        self.mean_loss = (kept * self.mean_loss if kept else 0.0) + (1 - kept) * loss.item()
        self.num_steps += 1
