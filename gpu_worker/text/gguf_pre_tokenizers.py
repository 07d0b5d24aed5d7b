"""How texts are split into words before byte pairs are merged, by the names in GGUF's `tokenizer.ggml.pre`.

Sources: the patterns are those of the models' own `tokenizer.json`, which llama.cpp names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED_LETTERS[0]}*{_CASED_LETTERS[1]}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED_LETTERS[0]}+{_CASED_LETTERS[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What comes before the merges.

    Attributes:
        pattern: Splits the text into words; None is GPT-2's pattern, which the library has built in.
        before: Patterns that split the text before that one does.
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


_GPT_2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(splits_digits=True)
_GPT_4 = PreTokenizer(_LLAMA3)
_LIKE_LLAMA3 = PreTokenizer(_LLAMA3, ignores_merges=True, adds_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": _GPT_2,
        "smollm": _SINGLE_DIGITS,
        "llama-bpe": _LIKE_LLAMA3,
        "llama3": _LIKE_LLAMA3,
        "llama-v3": _LIKE_LLAMA3,
        "qwen2": PreTokenizer(_QWEN2, composes=True),
        "deepseek-r1-qwen": PreTokenizer(_QWEN2),
        "tekken": PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
        "olmo": _GPT_2,
        "exaone4": _GPT_2,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "command-r": PreTokenizer(splits_digits=True, composes=True),
        "dbrx": _GPT_4,
        "smaug-bpe": _GPT_4,
        "glm4": _GPT_4,
        "chatglm-bpe": _GPT_4,
        "gpt-4o": PreTokenizer(_GPT_4O),
        "seed-coder": PreTokenizer(_SEED),
        "deepseek-v3": PreTokenizer(_DEEPSEEK_V3, before=(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+")),
    }
)
