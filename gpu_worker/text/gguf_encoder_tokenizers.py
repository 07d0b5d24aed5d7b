"""Tokenizers of encoders' GGUF files as the content of a `tokenizer.json`: pieces of words, or pieces with chances.

llama.cpp marks where words begin, as sentencepiece does; BERT's own vocabulary marks where they go on.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_worker.quantization.gguf.metadata import CONTROL, Metadata, token_id

_MARK, _GOES_ON = "▁", "##"
_UNKNOWN = 2
_CHARACTERS = "tokenizer.ggml.precompiled_charsmap"


def word_piece_tokenizer(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return BERT's, where a token continues a word unless it is marked as its beginning; may raise `GGUFError`."""
    pieces = [_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]
    unknown = token_id(metadata, "unknown")
    if unknown is None:
        raise metadata.error("tokenizer.ggml.unknown_token_id", "is missing; pieces of words need such a token")
    lowers = metadata.boolean("tokenizer.ggml.normalizer.lowercase", True)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lowers,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _around(metadata, tokens, ("cls", "bos"), ("seperator", "eos"), is_paired=True),
        "decoder": {"type": "WordPiece", "prefix": _GOES_ON, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": pieces[unknown],
            "continuing_subword_prefix": _GOES_ON,
            "max_input_chars_per_word": 100,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
        },
    }


def unigram_tokenizer(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return XLM-RoBERTa's: the pieces of the best joint probability; may raise `GGUFError`."""
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens)).tolist()
    unknown = next((index for index, kind in enumerate(types) if kind == _UNKNOWN), None)
    normalizer = None
    if _CHARACTERS in metadata:
        table = metadata.octets(_CHARACTERS)
        problem = problem_of_table(table)
        if problem is not None:
            raise metadata.error(_CHARACTERS, problem)
        content = base64.b64encode(table).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": content}
    spaces = {"type": "Metaspace", "replacement": _MARK, "prepend_scheme": "always", "split": True}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "post_processor": _around(metadata, tokens, ("bos", "cls"), ("eos", "seperator"), is_paired=False),
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [list(pair) for pair in zip(tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _piece(token: str, kind: int) -> str:
    if kind == CONTROL:
        return token
    return token[1:] if token.startswith(_MARK) else f"{_GOES_ON}{token}"


def _around(
    metadata: Metadata, tokens: Sequence[str], first: Sequence[str], last: Sequence[str], *, is_paired: bool
) -> dict[str, Any]:
    """Return the step that puts tokens around texts: `A`, or `A` and `B` with one or two tokens between them."""
    begin, end = (_named(metadata, roles) for roles in (first, last))

    def special(index: int, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokens[index], "type_id": kind}}

    one = [special(begin), {"Sequence": {"id": "A", "type_id": 0}}, special(end)]
    kind = 1 if is_paired else 0
    between = [] if is_paired else [special(end)]
    two = [*one, *between, {"Sequence": {"id": "B", "type_id": kind}}, special(end, kind)]
    named = {tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in (begin, end)}
    return {"type": "TemplateProcessing", "single": one, "pair": two, "special_tokens": named}


def _named(metadata: Metadata, roles: Sequence[str]) -> int:
    found = next((index for role in roles if (index := token_id(metadata, role)) is not None), None)
    if found is None:
        raise metadata.error(f"tokenizer.ggml.{roles[0]}_token_id", "is missing, but every text is to get this token")
    return found


_VALUE = 1 << 31
_HAS_VALUE = 1 << 8
_IS_FAR = 1 << 9
# Children of a unit are found by their byte, so that all of a block may be looked at.
_BLOCK = 256


def problem_of_table(table: bytes) -> str | None:
    """Return the error in SentencePiece's compiled table of characters; None if any text can be read by it.

    The `tokenizers` package does not check the table's numbers: a bad table ends the thread that loads or uses it.

    Source: darts-clone, whose double array it is: a unit holds a label, the distance to its children and a flag for a
    value among them. With the highest bit set it is a value: where a replacement begins in the texts behind the array.
    """
    num_bytes = int.from_bytes(table[:4], "little")
    if not num_bytes or num_bytes % 4 or 4 + num_bytes > len(table):
        return f"begins with an array of {num_bytes} bytes, and has {max(0, len(table) - 4)}"
    texts = np.frombuffer(table[4 + num_bytes :], np.uint8)
    try:
        texts.tobytes().decode()
    except UnicodeDecodeError:
        return "holds replacements that are not UTF-8"
    units = np.frombuffer(table[4 : 4 + num_bytes], "<u4").astype(np.int64)
    places = np.arange(len(units))
    shift = np.where(units & _IS_FAR, 8, 0)
    children = places ^ ((units >> 10) << shift)
    is_node = units & _VALUE == 0
    is_node[0] = True
    if (children[is_node] | (_BLOCK - 1)).max() >= len(units):
        return "leads beyond its end"
    values = units[children[is_node & (units & _HAS_VALUE != 0)]] & (_VALUE - 1)
    if values.size and values.max() >= len(texts):
        return "names replacements beyond its end"
    if (texts[values] & 0xC0 == 0x80).any():
        return "names replacements within a character"
    return None
