"""How much memory a model's weights will need, from the headers of its files alone."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_worker.models.stored_weights import open_weights

_TIED_HEAD = r"lm_head\.weight"
_NOTHING = r""


def weights_bytes(path: Path, dtype: torch.dtype, *, is_tied: bool) -> int:
    """Return the bytes of a model's weights in memory: exact for floating point numbers, about so for quantized ones.

    Args:
        path: A directory of safetensors files, or a GGUF file or one that holds it.
        dtype: What floating point numbers are converted to.
        is_tied: The output matrix is the embedding's, wherever the files have both.

    Raises:
        HeadraceError: A file is missing or damaged.
    """
    with open_weights(path, dtype, torch.device("cpu")) as checkpoint:
        return checkpoint.num_bytes_loaded(_TIED_HEAD if is_tied else _NOTHING)
