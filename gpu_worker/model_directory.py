"""What the worker must know of a model before it loads one: read from a Hugging Face directory, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model's directory and the facts from its configuration files.

    Attributes:
        vocab_size: Token ids the model can produce: `0 ... vocab_size - 1`.
        max_model_len: Context length the model was made for, in tokens.
        eos_token_ids: Tokens that end a sequence.
        bos_token_id: Token that stands for an empty prompt, if the model names one.
        tokenizer_config: Content of `tokenizer_config.json`; empty when there is none.
    """

    path: Path
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    tokenizer_config: dict[str, Any]

    @property
    def tokenizer_file(self) -> Path:
        """The fast tokenizer's file."""
        return self.path / "tokenizer.json"


def read_model_directory(path: Path) -> ModelDirectory:
    """Read a model's configuration files.

    Raises:
        ConfigError: The directory or a file in it is missing or unusable.
    """
    if not path.is_dir():
        raise ConfigError("HEADRACE_MODEL", f"{path} is not a directory; give the directory of a Hugging Face model")
    config = _read_json(path / "config.json", required=True)
    text_config = config.get("text_config") or config
    generation = _read_json(path / "generation_config.json")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError("HEADRACE_MODEL", f"{path} has no tokenizer.json; convert the tokenizer to the fast format")
    bos = _token_ids(generation.get("bos_token_id"), text_config.get("bos_token_id"))
    return ModelDirectory(
        path=path,
        vocab_size=_positive(path, text_config, "vocab_size"),
        max_model_len=_positive(path, text_config, "max_position_embeddings"),
        eos_token_ids=frozenset(_token_ids(generation.get("eos_token_id"), text_config.get("eos_token_id"))),
        bos_token_id=bos[0] if bos else None,
        tokenizer_config=_read_json(path / "tokenizer_config.json"),
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError("HEADRACE_MODEL", f"{path} is missing")
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("HEADRACE_MODEL", f"{path} is not usable: {error}") from error


def _positive(path: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError("HEADRACE_MODEL", f"{path / 'config.json'} has no usable {name}")
    return value


def _token_ids(*candidates: Any) -> list[int]:
    """Return the first candidate that is a token id or a list of them, as a list."""
    for candidate in candidates:
        if isinstance(candidate, int):
            return [candidate]
        if isinstance(candidate, list) and candidate:
            return candidate
    return []
