"""A layer that predicts the next hidden vector, in whichever form computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.config import ModelConfig
from gpu_worker.speculative.hidden_vectors.form import Candidates, EntryStep, LayerForm
from kernels.linear import Linear


class DraftLayer:
    """A layer that was trained for one model, and predicts its next hidden vector. Holds weights only.

    Attributes:
        config: Its sizes; one layer.
        dtype: What it computes in.
        device: Where it runs.
        relative_cost: What a pass takes, with the scores, as a share of a step of the model: by their weights, which is
            what takes the time.
    """

    def __init__(
        self,
        config: ModelConfig,
        form: LayerForm,
        dtype: torch.dtype,
        device: torch.device,
        relative_cost: float,
        reduce: Linear | None = None,
    ) -> None:
        """Hold the layer's form; what is described above is as it is there.

        Args:
            config: Of one layer.
            form: What computes it.
            dtype: Of its results.
            device: Where they are.
            relative_cost: Of a pass.
            reduce: Makes one vector of what the model reports of its layers; None reads what the model's head reads.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self.relative_cost = relative_cost
        self._reduce = reduce
        self._form = form

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Write entries into the cache, and return what they yield; `hidden` is as the model's `forward()` returned."""
        return self._form(EntryStep(token_ids, self._read(hidden), positions, context))

    def draft(
        self, step: EntryStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Candidates]]:
        """Do what `LayerForm` promises, with hidden vectors that the model's `forward()` returned."""
        read = dataclasses.replace(step, hidden=self._read(step.hidden))
        return self._form.draft(read, limits, num_candidates, least_score)

    def _read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take from the model's vectors what the layer reads."""
        if self._reduce is None:
            return hidden
        return self._reduce(hidden[:, self.config.hidden_size :].to(self.dtype))
