"""A fingerprint of a model's files: small ones whole, 64 samples of large ones, which are too slow to read whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpu_worker.quantization.gguf.model_file import find_gguf

_PATTERNS = ("*.json", "*.jinja", "*.safetensors", "*_Dense/*.safetensors")
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_revision(model: Path, *settings: str) -> str:
    """Return 16 hex digits that differ when a file of the model or a setting that decides its answers does."""
    digest = hashlib.sha256("\0".join(settings).encode())
    gguf = find_gguf(model)
    for path in [gguf] if gguf else sorted(path for pattern in _PATTERNS for path in model.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for index in range(_NUM_SAMPLES):
                file.seek(index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
