"""Memory that shows what a kernel left unwritten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let `torch.empty` return NaN inside the block."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
