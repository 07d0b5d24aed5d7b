"""A GGUF file's tokenizer, rewritten as the `tokenizer.json` that the tokenizers library reads.

Three models cover the decoders that can be served: byte pairs with a list of merges ("gpt2"), sentencepiece's pairs
("llama"), whose merges follow from the tokens' scores, and the latter with a list of merges ("gemma4"). Encoders have
two more ("bert", "t5").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from gpu_worker.quantization.gguf.metadata import CONTROL, TOKEN_TYPES, TOKENS, Metadata, token_id
from gpu_worker.text.gguf_encoder_tokenizers import unigram_tokenizer, word_piece_tokenizer
from gpu_worker.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED = 1, 2, 4, 5
_SPACE_MARK = "▁"
# Llama 2's vocabulary makes 62,000 pairs. A hostile one makes many more than it has tokens.
_MAX_MERGES = 4_000_000
# The longest token of a real vocabulary is a run of some hundred spaces. Cutting up a token takes the square of this.
_MAX_TOKEN_CHARACTERS = 512
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        """Ids of the tokens that texts can have; unused ones are left out."""
        kinds = zip(self.tokens, self.types, strict=True)
        return {token: index for index, (token, kind) in enumerate(kinds) if kind != _UNUSED}

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before anything else: special ones, and what the model's makers added."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": token, "special": kind != _USER_DEFINED, **flags}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, _UNKNOWN, _USER_DEFINED) and token
        ]


def tokenizer_json(metadata: Metadata) -> bytes:
    """Return the tokenizer as the content of a `tokenizer.json`; `GGUFError` if it is not supported or malformed."""
    vocabulary = _read_vocabulary(metadata)
    model = metadata.text(_MODEL)
    if model == "gpt2":
        content = _byte_pair_tokenizer(metadata, vocabulary)
    elif model == "llama":
        scores = metadata.numbers(_SCORES, len(vocabulary.tokens)).tolist()
        content = _sentencepiece_tokenizer(metadata, vocabulary, _merges_of_scores(metadata, vocabulary, scores))
    elif model == "gemma4":
        content = _sentencepiece_tokenizer(metadata, vocabulary, list(_read_merges(metadata, vocabulary.ids())))
    elif model == "bert":
        content = word_piece_tokenizer(metadata, vocabulary.tokens, vocabulary.types)
    elif model == "t5":
        content = unigram_tokenizer(metadata, vocabulary.tokens, vocabulary.types)
    else:
        raise metadata.error(_MODEL, f"is {model[:80]!r}; supported: 'gpt2', 'llama', 'gemma4', 'bert' and 't5'")
    shared = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": vocabulary.added()}
    return msgspec.json.encode(shared | content)


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return what `tokenizer_config.json` would hold: special tokens by role, and the chat template."""
    tokens = metadata.texts(TOKENS)
    ids = {name: token_id(metadata, role) for name, role in _ROLES.items()}
    config: dict[str, Any] = {name: tokens[index] for name, index in ids.items() if index is not None}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    return config


def _read_vocabulary(metadata: Metadata) -> _Vocabulary:
    tokens = metadata.texts(TOKENS)
    if len(set(tokens)) < len(tokens):
        raise metadata.error(TOKENS, "names a token twice")
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TOKEN_CHARACTERS:
        raise metadata.error(TOKENS, f"holds a token of {longest} characters; at most {_MAX_TOKEN_CHARACTERS} are read")
    types = metadata.numbers(TOKEN_TYPES, len(tokens)).tolist() if TOKEN_TYPES in metadata else [_NORMAL] * len(tokens)
    return _Vocabulary(tokens, types)


def _byte_pair_tokenizer(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    pre = _pre_tokenizer(metadata)
    ids = vocabulary.ids()
    return {
        "normalizer": {"type": "NFC"} if pre.composes else None,
        "pre_tokenizer": pre.steps(),
        "post_processor": _template(metadata, vocabulary, adds_bos=pre.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignores_merges,
            "vocab": ids,
            "merges": list(_read_merges(metadata, ids)),
        },
    }


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    supported = ", ".join(PRE_TOKENIZERS)
    if _PRE not in metadata:
        raise metadata.error(_PRE, f"is missing; convert the model with a newer tool, which names one of {supported}")
    name = metadata.text(_PRE)
    if name not in PRE_TOKENIZERS:
        raise metadata.error(_PRE, f"is {name[:80]!r}; supported: {supported}")
    return PRE_TOKENIZERS[name]


def _read_merges(metadata: Metadata, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    for merge in metadata.texts(_MERGES):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise metadata.error(_MERGES, f"holds {merge[:80]!r}, which is not two tokens that make a third")
        yield left, right


def _sentencepiece_tokenizer(
    metadata: Metadata, vocabulary: _Vocabulary, merges: list[tuple[str, str]]
) -> dict[str, Any]:
    has_prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    marks_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    prefix = [{"type": "Prepend", "prepend": _SPACE_MARK}] if has_prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = token_id(metadata, "unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, marks_spaces]},
        "pre_tokenizer": None,
        "post_processor": _template(metadata, vocabulary, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids(),
            "merges": merges,
        },
    }


def _merges_of_scores(metadata: Metadata, vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Order all pairs of tokens that make a token by its score, the highest first, then by the longer left half."""
    ids = vocabulary.ids()
    made = (
        (-score, -cut, token[:cut], token[cut:])
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if kind == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    )
    pairs = list(islice(made, _MAX_MERGES + 1))
    if len(pairs) > _MAX_MERGES:
        raise metadata.error(TOKENS, f"holds tokens that can be made in more than {_MAX_MERGES} ways")
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _template(metadata: Metadata, vocabulary: _Vocabulary, *, adds_bos: bool) -> dict[str, Any] | None:
    before = _edge_token(metadata, vocabulary, "bos", adds_bos)
    after = _edge_token(metadata, vocabulary, "eos", False)
    if not before and not after:
        return None
    around = {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in (before | after).items()}

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for kind, name in enumerate(sequences):
            parts += [{"SpecialToken": {"id": token, "type_id": kind}} for token in before]
            parts.append({"Sequence": {"id": name, "type_id": kind}})
            parts += [{"SpecialToken": {"id": token, "type_id": kind}} for token in after]
        return parts

    single, pair = template("A"), template("A", "B")
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": around}


def _edge_token(metadata: Metadata, vocabulary: _Vocabulary, role: str, default: bool) -> dict[str, int]:
    index = token_id(metadata, role)
    if not metadata.boolean(f"tokenizer.ggml.add_{role}_token", default and index is not None):
        return {}
    if index is None:
        raise metadata.error(f"tokenizer.ggml.{role}_token_id", f"is missing, but every text is to get one ({role})")
    return {vocabulary.tokens[index]: index}
