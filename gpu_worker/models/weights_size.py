"""How much memory a model's weights will need, from the headers of its files alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.stored_weights import open_weights
from kernels.linear.dense import keeps_half

_TIED_HEAD = r"lm_head\.weight"
_NOTHING = r""


def weights_bytes(
    path: Path, dtype: torch.dtype, device: torch.device, *, is_tied: bool, names: TensorNames | None = None
) -> int:
    """Return the bytes of a model's weights in memory: exact for floating point numbers, about so for quantized ones.

    Args:
        path: A directory of safetensors files, or a GGUF file or one that holds it.
        dtype: What the model computes in.
        device: Where it runs.
        is_tied: The output matrix is the embedding's, wherever the files have both.
        names: What the family calls its tensors, and which of them are unused.

    Raises:
        HeadraceError: A file is missing or damaged.
    """
    keeps = partial(keeps_half, inputs=dtype, device=device)
    with open_weights(path, dtype, torch.device("cpu"), keeps_half=keeps, names=names) as checkpoint:
        return checkpoint.num_bytes_loaded(_TIED_HEAD if is_tied else _NOTHING)
