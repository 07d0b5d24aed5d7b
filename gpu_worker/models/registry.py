"""The model families that can be served, by the name that checkpoints give in `architectures`.

To add a family, write a file with `ARCHITECTURE` and `read_config`, and list it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from gpu_worker.models import llama, mistral, qwen2, qwen3
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_config import read_gguf_config
from gpu_worker.models.json_file import JsonFile
from gpu_worker.quantization.gguf.model_file import find_gguf

FAMILIES: Mapping[str, Callable[[JsonFile], ModelConfig]] = MappingProxyType(
    {family.ARCHITECTURE: family.read_config for family in (llama, qwen2, qwen3, mistral)}
)


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
