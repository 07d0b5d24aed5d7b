"""Which of a mixture's experts are here, and how tokens fall on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.layers.stored_matrix import whole
from kernels.moe import ExpertWeights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShare:
    """Which of a layer's experts are here, or which features of each.

    Attributes:
        places: The expert in each place of all processes, in the beginning.
        rows: `[num_features]` int64, which features of an expert's first projection are here; None is all.
        columns: Which inputs of the last projection; None is all.
        stored: Both projections of all experts in the checkpoint, where experts move; else None.
    """

    num_experts: int
    places: tuple[int, ...]
    own: range
    rows: torch.Tensor | None = None
    columns: range | None = None
    stored: tuple[ExpertWeights, ExpertWeights] | None = None

    @property
    def experts(self) -> tuple[int, ...]:
        """Those that are here."""
        return self.places[self.own.start : self.own.stop]


def weights_of(experts: ExpertWeights, chosen: Sequence[int]) -> ExpertWeights:
    """Return the weights of some experts, read where they are still stored."""
    bias = None if experts.bias is None else experts.bias[list(chosen)]
    return ExpertWeights(tuple(whole(experts.forms[expert]) for expert in chosen), bias)


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens on experts since the model was loaded.

    Attributes:
        tokens: Times that an expert was given a token, over all layers.
        imbalance: The most that an expert got over the mean of its layer, in the layer where that is most; 0 before
            the first token.
        unused: Experts, over all layers, that no token went to.
    """

    tokens: int
    imbalance: float
    unused: int


class ExpertLoads:
    """Reads the counters of a model's mixtures; any thread may do so while steps are computed. It waits for a GPU."""

    def __init__(self, tokens_per_expert: Sequence[torch.Tensor]) -> None:
        self._counters = tuple(tokens_per_expert)
        self._sizes = [len(counter) for counter in self._counters]
        device = self._counters[0].device
        # A stream of its own, because that of the model has steps before and behind whatever is put into it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def by_layer(self) -> list[torch.Tensor]:
        """Return the tokens that each expert got since the model was loaded, `[num_experts]` int64 a layer."""
        with torch.cuda.stream(self._stream):
            # One copy from the device, however many layers there are.
            return list(torch.cat(self._counters).cpu().split_with_sizes(self._sizes))

    def read(self) -> ExpertLoad:
        """Return the numbers of this moment."""
        counts = [counter.double() for counter in self.by_layer()]
        busiest = [float(layer.max() / layer.mean()) for layer in counts if layer.any()]
        unused = sum(int((layer == 0).sum()) for layer in counts)
        return ExpertLoad(int(sum(float(layer.sum()) for layer in counts)), max(busiest, default=0.0), unused)
