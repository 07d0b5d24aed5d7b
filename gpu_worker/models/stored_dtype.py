"""What a checkpoint's weights are stored in, by its files: some configurations do not say it, such as gpt-oss'."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.tensor_file import TensorFile

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def stored_dtype(directory: Path) -> torch.dtype | None:
    """Return what most bytes of the first file's weights are, quantized ones apart; None where no file can be read."""
    path = min(directory.glob("model*.safetensors"), default=None)
    if path is None:
        return None
    try:
        file = TensorFile(path)
    except CheckpointError:
        # Whoever reads the weights says what is wrong with the file.
        return None
    num_bytes: Counter[torch.dtype] = Counter()
    for tensor in file.tensors.values():
        if isinstance(tensor.dtype, torch.dtype) and tensor.dtype in _FLOATS:
            num_bytes[tensor.dtype] += tensor.num_bytes
    file.close()
    return max(num_bytes, key=num_bytes.__getitem__, default=None)
