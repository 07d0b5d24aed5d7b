"""How much memory a model's weights will need, from the headers of its files alone."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_worker.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint

_TIED_HEAD = r"lm_head\.weight"
_NOTHING = r""


def weights_bytes(path: Path, dtype: torch.dtype, *, is_tied: bool) -> int:
    """Return the bytes of a model's weights in memory: exact for floating point numbers, about so for quantized ones.

    Args:
        path: A directory of safetensors files; of other files the size is what they take on disk.
        dtype: What floating point numbers are converted to.
        is_tied: The output matrix is the embedding's, wherever the files have both.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        with Checkpoint(path, dtype, torch.device("cpu")) as checkpoint:
            return checkpoint.num_bytes_loaded(_TIED_HEAD if is_tied else _NOTHING)
    files = path.glob("*.gguf") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
