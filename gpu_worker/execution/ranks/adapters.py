"""Adapters as rank 0 sends them to the others: whole, a matrix at a time; each rank keeps what its features need."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from gpu_worker.execution.ranks.messages import AdapterPart, AdapterPiece, Numbers, encode
from gpu_worker.layers.adapters import AdapterTargets, Packed
from kernels.low_rank import LowRank, LowRankPart


def encoded_pieces(adapter: Mapping[str, LowRank]) -> list[bytes]:
    """Return an adapter's part beside each matrix, as `RankGroup.send` takes it."""
    pieces = []
    for name, low_rank in adapter.items():
        parts = [
            AdapterPart(part.rank, part.scale, part.features.numpy().tobytes(), _numbers(part.down), _numbers(part.up))
            for part in low_rank.parts
        ]
        pieces.append(encode(AdapterPiece(name, parts)))
    return pieces


class ReceivedAdapter:
    """Collects the pieces of one adapter after another, and packs each for this rank's part of the matrices."""

    def __init__(self, targets: AdapterTargets) -> None:
        self._targets = targets
        self._low_ranks: dict[str, LowRank] = {}
        self._error: Exception | None = None

    def add(self, piece: AdapterPiece) -> None:
        """Store a piece; `pack` raises what is wrong with it, if anything."""
        if self._error is None:
            try:
                self._add(piece)
            except Exception as error:
                self._error = error

    def pack(self) -> Packed:
        """Pack what the pieces add up to; the next piece begins another adapter.

        Raises:
            Exception: That cannot be done.
        """
        low_ranks, error = self._low_ranks, self._error
        self.clear()
        if error is not None:
            raise error
        return self._targets.pack(low_ranks)

    def clear(self) -> None:
        """Forget the pieces that came."""
        self._low_ranks, self._error = {}, None

    def _add(self, piece: AdapterPiece) -> None:
        matrix, parts = self._targets.matrices[piece.matrix], []
        for part in piece.parts:
            features = torch.from_numpy(np.frombuffer(part.features, dtype=np.int64).copy())
            down, up = _tensor(part.down, part.rank), _tensor(part.up, len(features))
            parts.append(LowRankPart(down, up, part.scale, features))
        self._low_ranks[piece.matrix] = LowRank(tuple(parts), matrix.shape, matrix.is_gated)


def _numbers(matrix: torch.Tensor) -> Numbers:
    return Numbers(matrix.dtype is torch.bfloat16, matrix.contiguous().view(torch.uint8).numpy().tobytes())


def _tensor(numbers: Numbers, num_rows: int) -> torch.Tensor:
    dtype = torch.bfloat16 if numbers.is_bfloat16 else torch.float32
    return torch.frombuffer(bytearray(numbers.data), dtype=dtype).view(num_rows, -1)
