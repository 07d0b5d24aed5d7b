"""From hidden vectors to scores of the vocabulary: the head at the top of a model."""

from __future__ import annotations

import torch

from gpu_worker.layers.ranks import ALONE, Ranks
from kernels.linear import Linear, OperationLinear
from kernels.linear.cpu import QuantizedPanels
from kernels.linear.dense import DensePanels
from kernels.linear.panels import PanelMatrix
from kernels.low_rank import AdapterRows, AdapterTable


class LMHead:
    """Scores every token of the vocabulary for each hidden vector."""

    __slots__ = ("_adapters", "_dtype", "_projection", "_ranks", "_scale", "_soft_cap", "_vocab_size")

    def __init__(
        self,
        projection: Linear,
        dtype: torch.dtype,
        scale: float = 1.0,
        soft_cap: float | None = None,
        ranks: Ranks = ALONE,
        vocab_size: int = 0,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._adapters = adapters
        self._projection = projection
        self._dtype = dtype
        self._scale = scale
        self._soft_cap = soft_cap
        self._ranks = ranks
        self._vocab_size = vocab_size

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return float32 logits `[num_rows, vocab_size]` for `hidden: [num_rows, hidden_size]` and their adapters.

        Where the vocabulary is divided, those are a rank's, as many on each: minus infinity behind the last token.
        """
        hidden = hidden if hidden.dtype is self._dtype else hidden.to(self._dtype)
        logits = self._projection.to_float32(hidden)
        if adapters is not None and self._adapters is not None:
            self._adapters.add(hidden, logits, adapters)
        if self._ranks.size > 1:
            own = self._vocab_size - self._ranks.rank * logits.shape[1]
            if own < logits.shape[1]:
                logits[:, max(0, own) :] = -torch.inf
        if self._scale != 1:
            logits.mul_(self._scale)
        if self._soft_cap is not None:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def packed_for(self, dtype: torch.dtype) -> PanelMatrix | None:
        """Return the matrix as the CPU kernels take it, to multiply vectors of this type; None when there is none.

        Its products are not scaled or bounded: the likeliest token is the same.
        """
        is_whole = self._ranks.size == 1 and dtype is self._dtype
        packed = self._projection.packed if isinstance(self._projection, OperationLinear) else None
        return packed if is_whole and isinstance(packed, DensePanels | QuantizedPanels) else None
