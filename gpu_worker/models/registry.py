"""A model's configuration, from its directory or GGUF file, by the family that the checkpoint names."""

from __future__ import annotations

from pathlib import Path

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import find_families
from gpu_worker.models.gguf_config import read_gguf_config
from gpu_worker.models.json_file import JsonFile
from gpu_worker.quantization.gguf.model_file import find_gguf

FAMILIES = find_families()


def read_model_config(directory: Path) -> ModelConfig:
    """Read a model's configuration, without its weights, from its directory or GGUF file.

    Raises:
        HeadraceError: A file or field is missing, malformed or not supported.
    """
    if (gguf := find_gguf(directory)) is not None:
        return read_gguf_config(gguf)
    file = JsonFile.read(directory / "config.json")
    for name in file.texts("architectures"):
        if name in FAMILIES:
            return FAMILIES[name](file)
    given = ", ".join(repr(name[:80]) for name in file.texts("architectures")[:4]) or "missing"
    raise file.error("architectures", f"is {given}; supported: {', '.join(FAMILIES)}")
