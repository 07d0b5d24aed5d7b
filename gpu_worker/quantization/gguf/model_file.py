"""Which file `--model` means where it names a GGUF file, or a directory that holds one."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError

SUFFIX = ".gguf"


def find_gguf(model: Path) -> Path | None:
    """Return the GGUF file that `model` is or holds, None for another format; `ConfigError` if it holds several.

    A directory with `config.json` is in Hugging Face's format, whatever else it holds.
    """
    if model.suffix == SUFFIX and model.is_file():
        return model
    if not model.is_dir() or (model / "config.json").exists():
        return None
    files = sorted(model.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        named = ", ".join(file.name for file in files[:4])
        raise ConfigError("HEADRACE_MODEL", f"{model} holds {len(files)} GGUF files ({named}); name one of them")
    return files[0] if files else None
