"""Opens the weights of Medusa heads and EAGLE layers, which many publish in formats that are not read here."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_worker.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from gpu_worker.models.errors import CheckpointError

MEDUSA_FILE = "medusa_lm_head.safetensors"

_PICKLES = ("*.pt", "*.bin", "*.pth")


def open_draft_weights(directory: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Open the weights; use the result as a context manager.

    Args:
        directory: Holds `medusa_lm_head.safetensors` or `model.safetensors`, or an index and its shards.
        dtype: What tensors are converted to.
        device: Where they are put.

    Raises:
        CheckpointError: A file is missing or damaged, or there are pickled weights only.
    """
    if (directory / MEDUSA_FILE).exists():
        return Checkpoint(directory, dtype, device, single_file=MEDUSA_FILE)
    if not any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        for pickle in sorted(path for pattern in _PICKLES for path in directory.glob(pattern)):
            problem = f"is pickled, which runs code when it is read; convert its tensors to {SINGLE_FILE}"
            raise CheckpointError(pickle, problem)
    return Checkpoint(directory, dtype, device)
