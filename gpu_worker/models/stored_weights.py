"""Opens a model's weights, in whichever format they are stored, and says how much memory they will need."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.checkpoint import Checkpoint, Progress
from gpu_worker.quantization.gguf.checkpoint import GGUFCheckpoint
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.quantization.quantization_method import KeepsHalf
from kernels.linear.dense import keeps_half

StoredWeights = Checkpoint | GGUFCheckpoint


def open_weights(
    model: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    keeps_half: KeepsHalf | None = None,
    names: TensorNames | None = None,
) -> StoredWeights:
    """Open the weights of a model, a context manager; arguments as of `Checkpoint`. `names` defaults to Llama's."""
    gguf = find_gguf(model)
    if gguf is not None:
        return GGUFCheckpoint(gguf, dtype, device, progress, keeps_half=keeps_half)
    renamed, unused = ((), ()) if names is None else (names.renamed, names.unused)
    return Checkpoint(
        model, dtype, device, progress, keeps_half=keeps_half, adds_root=True, renamed=renamed, unused=unused
    )


_TIED_HEAD = r"lm_head\.weight"
_NOTHING = r""


def weights_bytes(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_tied: bool,
    names: TensorNames | None = None,
    compiles: bool = True,
) -> int:
    """Return the bytes of a model's weights in memory: exact for floating point, approximate for quantized ones."""
    keeps = partial(keeps_half, inputs=dtype, device=device, compiles=compiles)
    with open_weights(path, dtype, torch.device("cpu"), keeps_half=keeps, names=names) as checkpoint:
        return checkpoint.num_bytes_loaded(_TIED_HEAD if is_tied else _NOTHING)
