"""What each token id contributes to the text, worked out once per tokenizer, so that decoding is a table look-up.

Two styles of tokenizer cover nearly all models. *Byte level*: every token stands for bytes, and the text is the UTF-8
reading of all bytes. *Byte fallback* (sentencepiece): tokens are text with `▁` for a space, and characters that are in
no token are spelled by tokens named `<0x0A>`. Other tokenizers have no table and are decoded by the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from tokenizers import Tokenizer

Style = Literal["byte_level", "byte_fallback"]

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Contribution of every token id.

    Attributes:
        texts: The token's text; "" for a special or unused id; None when the token is not valid UTF-8 by itself.
        raw: The token's bytes.
        strips_space: One leading space of the whole text is dropped, which sentencepiece models add.
    """

    style: Style
    texts: list[str | None]
    raw: list[bytes]
    strips_space: bool = False


def with_special_tokens(table: TokenTable, special: Mapping[int, str]) -> TokenTable:
    """Return a table that shows special tokens by their names, as decoding with `skip_special_tokens=False` does."""
    texts, raw = list(table.texts), list(table.raw)
    alphabet = _byte_level_alphabet()
    for token_id, name in special.items():
        if token_id >= len(raw):
            continue
        if table.style == "byte_level":
            raw[token_id] = _byte_level_bytes(name, alphabet)
            texts[token_id] = _text(raw[token_id])
        else:
            texts[token_id] = name.replace(_SPACE_MARK, " ")
            raw[token_id] = name.replace(_SPACE_MARK, " ").encode()
    return replace(table, texts=texts, raw=raw)


def build_table(tokenizer: Tokenizer, tokenizer_json: bytes, vocab_size: int) -> TokenTable | None:
    """Build the table of a tokenizer loaded from `tokenizer_json`; None when its decoder is of neither style."""
    decoder = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder
    tokens = _visible_tokens(tokenizer, vocab_size)
    if decoder is None:
        return None
    if _flatten(decoder) == [{"type": "ByteLevel"}]:
        return _byte_level_table(tokens)
    strips_space = _byte_fallback_strips_space(_flatten(decoder))
    return None if strips_space is None else _byte_fallback_table(tokens, strips_space)


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


def _visible_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str | None]:
    tokens: list[str | None] = [None] * max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < len(tokens):
            tokens[token_id] = token
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if token_id < len(tokens):
            tokens[token_id] = None if added.special else added.content
    return tokens


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kept = {"type", "pattern", "content", "start", "stop"}
    return [{key: value for key, value in step.items() if key in kept} for step in steps]


def _byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's `bytes_to_unicode` inverted: byte-level characters to those of the same byte (Latin-1)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {0x100 + index: chr(byte) for index, byte in enumerate(others)}
    return alphabet


def _byte_level_table(tokens: list[str | None]) -> TokenTable:
    alphabet = _byte_level_alphabet()
    raw = [b"" if token is None else _byte_level_bytes(token, alphabet) for token in tokens]
    return TokenTable("byte_level", [_text(value) for value in raw], raw)


def _byte_level_bytes(token: str, alphabet: dict[int, str]) -> bytes:
    if all(ord(char) in alphabet for char in token):
        return token.translate(alphabet).encode("latin-1")
    return token.encode()


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _byte_fallback_strips_space(steps: list[dict[str, Any]]) -> bool | None:
    """Return True if the decoder drops one leading space; None when it is not of the sentencepiece kind."""
    base = [
        {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if steps == base:
        return False
    if steps == [*base, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return True
    return None


def _byte_fallback_table(tokens: list[str | None], strips_space: bool) -> TokenTable:
    texts: list[str | None] = []
    raw: list[bytes] = []
    for token in tokens:
        if token is not None and (match := _BYTE_TOKEN.fullmatch(token)):
            texts.append(None)
            raw.append(bytes([int(match[1], 16)]))
        else:
            text = "" if token is None else token.replace(_SPACE_MARK, " ")
            texts.append(text)
            raw.append(text.encode())
    return TokenTable("byte_fallback", texts, raw, strips_space)
