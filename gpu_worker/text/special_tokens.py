"""The special tokens that a tokenizer's files name, by names such as `eos_token`, as `transformers` reads them.

A file `special_tokens_map.json` goes before `tokenizer_config.json`, except where that has `added_tokens_decoder`, as
all have that were written in the last years. What neither names, the tokenizer's class may. A model's own names, such
as `image_token`, are fields of these files or stand in `extra_special_tokens`. Tokens that `tokenizer.json` lacks are
added to it, and text is split at them.

Source: `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__`, of transformers 5.24.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gpu_worker.text.model_directory import ModelDirectory, read_json
from gpu_worker.text.tokenizer_classes import default_tokens
from shared.errors import ConfigError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
_ID = re.compile("[0-9]{1,9}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens by their `named` names, without a name in `unnamed`, and by their ids in `added_tokens_decoder`."""

    named: dict[str, AddedToken]
    unnamed: list[AddedToken]
    listed: dict[int, AddedToken]

    @property
    def texts(self) -> dict[str, str]:
        """Return what templates know them by."""
        return {name: token.content for name, token in self.named.items()}

    @property
    def contents(self) -> list[str]:
        """Return the text of each."""
        return [token.content for token in (*self.named.values(), *self.unnamed, *self.listed.values())]

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Add those that a tokenizer lacks, or has with other flags in its own list."""
        known = tokenizer.get_added_tokens_decoder().values()
        same = {repr(token) for token in known}
        missing = [token for _, token in sorted(self.listed.items()) if repr(token) not in same]
        contents = {token.content for token in (*known, *missing)}
        for token in (*self.named.values(), *self.unnamed):
            if token.content not in contents:
                missing.append(token)
                contents.add(token.content)
        names = set(self.texts.values())
        for token in missing:
            token.special = token.special or token.content in names
        tokenizer.add_tokens(missing)


def read_special_tokens(directory: ModelDirectory, tokenizer_json: bytes) -> SpecialTokens:
    """Read the special tokens; `ConfigError` if a file is not usable."""
    settings: dict[str, Any] = dict(directory.tokenizer_config)
    listed = settings.get("added_tokens_decoder")
    mapped = read_json(directory.path / "special_tokens_map.json") if listed is None else {}
    fields = {**_class_tokens(directory, tokenizer_json), **settings, **mapped}
    named = {name: fields.get(name) for name in _NAMES}
    # Of a model's own names, texts of `tokenizer_config.json` go before the other file, and objects of it behind.
    named |= _own_names(fields) | {
        name: value for name, value in _own_names(settings).items() if isinstance(value, str)
    }
    extras = [settings.get(_EXTRA) or settings.get(_OLD_EXTRA), mapped.get(_EXTRA)]
    if not any(isinstance(extra, list) for extra in extras):
        extras.append(mapped.get(_OLD_EXTRA))
    unnamed: list[Any] = []
    for extra in extras:
        named |= extra if isinstance(extra, dict) else {}
        unnamed += extra if isinstance(extra, list) else []
    by_id = listed.items() if isinstance(listed, dict) else ()
    return SpecialTokens(
        {name: token for name, value in named.items() if (token := _token(value)) is not None},
        [token for value in unnamed if (token := _token(value)) is not None],
        {int(key): token for key, value in by_id if _ID.fullmatch(key) and (token := _token(value, False)) is not None},
    )


def _own_names(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name.endswith("_token") and name not in _NAMES}


def _class_tokens(directory: ModelDirectory, tokenizer_json: bytes) -> dict[str, str]:
    config = read_json(directory.path / "config.json")
    named = directory.tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    class_name = named if isinstance(named, str) else None
    # The bytes that `transformers` looks for.
    is_byte_level = b'"ByteLevel"' in tokenizer_json
    return dict(default_tokens(str(config.get("model_type")), class_name, is_byte_level=is_byte_level))


def _token(value: object, is_special: bool = True) -> AddedToken | None:
    """Return the token of a text or object; None for a value of another type. `ConfigError` for invalid Unicode."""
    fields = {"content": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(content := fields.get("content"), str):
        return None
    flags = {name: fields[name] for name in _FLAGS if isinstance(fields.get(name), bool)}
    try:
        return AddedToken(content, **({"special": is_special} | flags))
    except UnicodeEncodeError:
        problem = f"the special token {content[:40]!a} of the tokenizer is not valid Unicode"
        raise ConfigError("HEADRACE_MODEL", problem) from None
