"""The special tokens that a tokenizer's files name, by names such as `eos_token`, as `transformers` reads them.

A file `special_tokens_map.json` goes before `tokenizer_config.json`, except where that has `added_tokens_decoder`, as
all have that were written in the last years. What neither names, the tokenizer's class may. A model's own names, such
as `image_token`, are fields of these files or stand in `extra_special_tokens`.

Source: `PreTrainedTokenizerBase._from_pretrained` and its `__init__`, of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from gpu_worker.text.model_directory import ModelDirectory, read_json
from gpu_worker.text.tokenizer_classes import default_tokens

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = "extra_special_tokens"


def read_special_tokens(directory: ModelDirectory, tokenizer_json: bytes) -> dict[str, str]:
    """Return the special tokens that templates name, by these names; `ConfigError` if a file is not usable."""
    settings: dict[str, Any] = dict(directory.tokenizer_config)
    is_mapped = "added_tokens_decoder" not in settings
    mapped = read_json(directory.path / "special_tokens_map.json") if is_mapped else {}
    fields = {**_class_tokens(directory, tokenizer_json), **settings, **mapped}
    named = {name: fields.get(name) for name in _NAMES}
    # Of a model's own names, texts of `tokenizer_config.json` go before the other file, and objects of it behind.
    named |= _own_names(fields) | {
        name: value for name, value in _own_names(settings).items() if isinstance(value, str)
    }
    for extra in (settings.get(_EXTRA), mapped.get(_EXTRA)):
        named |= extra if isinstance(extra, dict) else {}
    texts = {name: _text(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _own_names(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name.endswith("_token") and name not in _NAMES}


def _class_tokens(directory: ModelDirectory, tokenizer_json: bytes) -> dict[str, str]:
    config = read_json(directory.path / "config.json")
    named = directory.tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    class_name = named if isinstance(named, str) else None
    # The bytes that `transformers` looks for.
    is_byte_level = b'"ByteLevel"' in tokenizer_json
    return dict(default_tokens(str(config.get("model_type")), class_name, is_byte_level=is_byte_level))


def _text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
