"""A GGUF file's tokenizer, rewritten as the `tokenizer.json` that the tokenizers library reads.

Three models cover the decoders that can be served: byte pairs with a list of merges ("gpt2"), sentencepiece's pairs
("llama"), whose merges follow from the tokens' scores, and the latter with a list of merges ("gemma4"). Encoders have
two more ("bert", "t5").

How texts are split into words before byte pairs are merged, by the names in GGUF's `tokenizer.ggml.pre`.

Sources: the patterns are those of the models' own `tokenizer.json`, which llama.cpp names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from gpu_worker.quantization.gguf.metadata import CONTROL, TOKEN_TYPES, TOKENS, Metadata, token_id
from gpu_worker.text.gguf_encoder_tokenizers import unigram_tokenizer, word_piece_tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_LETTERS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS_AND_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED_LETTERS[0]}*{_CASED_LETTERS[1]}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED_LETTERS[0]}+{_CASED_LETTERS[1]}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Letters that are no Chinese, in the classes that stand for them.
_OTHER_CASED = tuple(f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in _CASED_LETTERS)
_KIMI_K2 = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_OTHER_CASED[0]}*{_OTHER_CASED[1]}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_OTHER_CASED[0]}+{_OTHER_CASED[1]}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
)
_LINE_ENDS = r"[\r\n]"
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# What DeepSeek's first tokenizers take for letters that have cases.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LLM = (_LINE_ENDS, rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?{_DEEPSEEK_SIGNS}+", r"\s+$", _CHINESE)
_BEFORE_DEEPSEEK_V3 = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+")
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED_LETTERS[0]}*{_CASED_LETTERS[1]}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED_LETTERS[0]}+{_CASED_LETTERS[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words may follow one another within a piece.
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Digits in threes, counted from the end of a number.
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What comes before the merges.

    Attributes:
        pattern, before: Split the text into words, `before` first; None is GPT-2's built-in pattern.
        splits_digits: Every digit is a word of its own, before the pattern.
        composes: Characters are put into Unicode's composed form (NFC) first.
        ignores_merges: A word that is a token is that token, whatever the merges would make of it.
        adds_bos: Texts begin with a begin-of-sequence token, unless the file says otherwise.
    """

    pattern: str | None = None
    before: tuple[str, ...] = ()
    splits_digits: bool = False
    composes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def steps(self) -> dict[str, Any]:
        """Return the pre-tokenizer in the form of `tokenizer.json`."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if self.splits_digits else []
        for pattern in (*self.before, *(() if self.pattern is None else (self.pattern,))):
            regex = {"Regex": pattern}
            steps.append({"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False})
        return {"type": "Sequence", "pretokenizers": [*steps, byte_level | {"use_regex": self.pattern is None}]}


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre_tokenizer
    for names, pre_tokenizer in (
        # The well-known names come first.
        ("gpt-2", PreTokenizer()),
        ("smollm", PreTokenizer(splits_digits=True)),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 midm-2.0 pixtral",
            PreTokenizer(_LLAMA3, ignores_merges=True, adds_bos=True),
        ),
        ("olmo exaone4 phi-2 mellum a.x-4.0 gigachat trillion granite-docling", PreTokenizer()),
        ("modern-bert mpt", PreTokenizer(composes=True)),
        ("starcoder refact exaone minerva-7b", PreTokenizer(splits_digits=True)),
        ("command-r", PreTokenizer(splits_digits=True, composes=True)),
        ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer(_LLAMA3)),
        ("deepseek-r1-qwen solar-open hunyuan stablelm2", PreTokenizer(_QWEN2)),
        ("qwen2 f2llmv2", PreTokenizer(_QWEN2, composes=True)),
        ("qwen35", PreTokenizer(_QWEN35, composes=True)),
        ("tekken", PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True)),
        ("gpt-4o llama4 minimax-m2 kanana2", PreTokenizer(_GPT_4O)),
        ("tiny_aya", PreTokenizer(_GPT_4O, before=(_THREES,))),
        ("kimi-k2", PreTokenizer(_KIMI_K2)),
        ("seed-coder", PreTokenizer(_SEED)),
        ("exaone-moe", PreTokenizer(_EXAONE_MOE)),
        ("deepseek-llm", PreTokenizer(r"\p{N}", before=_DEEPSEEK_LLM)),
        ("deepseek-coder", PreTokenizer(r"\p{N}", before=(_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE))),
        ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(_DEEPSEEK_V3, before=_BEFORE_DEEPSEEK_V3)),
    )
    for name in names.split()
}


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
