"""How evenly a model's tokens fall on its experts, as a few numbers for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
