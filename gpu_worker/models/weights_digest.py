"""A digest of all that a model's weights are: every byte of their files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpu_worker.quantization.gguf.model_file import find_gguf

_PATTERNS = ("config.json", "*.safetensors", "quant*config*.json")


def weights_digest(model: Path) -> bytes:
    """Return a SHA-256 over all bytes of the weight files and their configuration, at about 1 s a GB."""
    gguf = find_gguf(model)
    digest = hashlib.sha256()
    for path in [gguf] if gguf else sorted(path for pattern in _PATTERNS for path in model.glob(pattern)):
        with path.open("rb") as file:
            # A folder says by names which file is which; a GGUF file may be called anything.
            digest.update(path.name.encode() if gguf is None else b"gguf")
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
