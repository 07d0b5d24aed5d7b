"""Small tokenizers of both styles, trained by the tokenizers library, and their vocabularies in GGUF's terms."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# Applied one after another.
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
_CASELESS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASELESS}*[\p{{Ll}}{_CASELESS}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASELESS}+[\p{{Ll}}{_CASELESS}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O)
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of texts that have cases, but for those of mathematics.
_CASED = "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\U0001d400-\U0001d7ff]]+"
_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{_CASED}", rf"\s?{_SIGNS}", r"\s+$", _CHINESE)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? They'LL see 1234567 of them.",
    "def tokenize(text: str) -> list[int]:\n    return [ord(c) for c in text]\n\n\nprint(tokenize('abc'))\r\n\t\tend",
    "Ça fait déjà vu; naïve café. Übergrößenträger. Привет, мир! 日本語のテキスト、そして漢字。 안녕하세요 😀 🏳️‍🌈",
    "the the the then there these those thing thinking thought through  spaces   and    more     spaces",
] * 4
TEXTS = [
    *CORPUS[:4], "", " ", "   leading and trailing   ", "a", "\n\n\n \t x\r\n", "don't DON'T I'll I'LL we've 'tis",
    "12 123 1234 12345 3.14159 1,000,000", "cafe\u0301 cafÉ e\u0301\u0301 \u1e9b\u0323 ﬁ ½",
    "x=y+z;//path/to/file https://example.org/?q=1&r=2#frag", "ALLCAPS CamelCase snake_case kebab-case ÀÉÎ àéî",
    "\u200b\ufeff\x00\x01 control", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 👩‍👩‍👧‍👦 ١٢٣ ४५६",
    "<s> </s> <unk> <0x41> ▁ x▁y <|im_start|>user<|im_end|> <tool> [PAD7] <|", "<tool><tool> a<tool>b <|im_end|>c",
]  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, to be called with a `GGUFWriter`, and the tokenizer that it came from."""

    tokenizer: Tokenizer
    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    add_bos: bool | None = None
    chat_template: str | None = None
    add_space_prefix: bool = True

    def __call__(self, writer: Any) -> None:
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_unk_token_id(0)
        writer.add_bos_token_id(self.tokens.index("<s>"))
        writer.add_eos_token_id(self.tokens.index("</s>"))
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)
        if not self.add_space_prefix:
            writer.add_add_space_prefix(False)


_CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
_PADDING = [f"[PAD{index}]" for index in range(3)]


def _pre_tokenizer(pre: str) -> Any:
    if pre in ("gpt-2", "smollm", "command-r"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre != "gpt-2" else []
        return pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    known = {"qwen2": QWEN2, "tekken": TEKKEN, "gpt-4o": GPT_4O, "seed-coder": SEED, "qwen35": QWEN35, "kimi-k2": KIMI}
    known["exaone-moe"] = EXAONE_MOE
    several = {"deepseek-v3": DEEPSEEK_V3, "deepseek-llm": DEEPSEEK_LLM, "deepseek-coder": DEEPSEEK_CODER}
    several["tiny_aya"] = TINY_AYA
    patterns = several.get(pre, (known.get(pre, LLAMA3),))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    if pre in ("deepseek-llm", "deepseek-coder"):
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def byte_pair_vocabulary(pre: str = "gpt-2", add_bos: bool | None = None) -> Vocabulary:
    """Train a byte-pair tokenizer as Hugging Face's of that kind: special tokens and one that is only added."""
    ignores_merges = pre in ("llama-bpe", "tekken")
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.normalizer = normalizers.NFC() if pre in ("qwen2", "qwen35", "command-r") else None
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _CONTROL])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    if add_bos or (add_bos is None and ignores_merges):
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [bos])
    model = tokenizer.model
    tokens = [tokenizer.id_to_token(index) for index in range(size + len(_CONTROL) + 1)] + _PADDING
    types = [1] * size + [3] * len(_CONTROL) + [4] + [5] * len(_PADDING)
    return Vocabulary(tokenizer, "gpt2", pre, tokens, types, merges=_merges(model), add_bos=add_bos)


def _merges(model: Any) -> list[str]:
    state = json.loads(model.__getstate__())
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]


@cache
def sentencepiece_vocabulary(add_space_prefix: bool = True) -> Vocabulary:
    """Make a tokenizer as Llama 2's `tokenizer.json`: pieces with scores, bytes for characters that are in no piece."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    pieces = [piece for piece in pieces if len(piece) > 1] + [piece for piece in pieces if len(piece) == 1]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*head, *pieces, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * len(head) + [-float(rank) for rank in range(len(pieces))] + [0.0]
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = sorted(
        (
            (scores[ids[piece]], cut, len(piece) - cut, piece[:cut], piece[cut:])
            for piece in pieces
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ),
        key=lambda pair: pair[:3],
        reverse=True,
    )
    merges = [pair[3:] for pair in pairs]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    marks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks]) if add_space_prefix else marks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in head[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return Vocabulary(tokenizer, "llama", None, tokens, types, scores=scores, add_space_prefix=add_space_prefix)


def merged_vocabulary() -> Vocabulary:
    """Make a tokenizer as Gemma 4's: pieces like sentencepiece's, whose merges are listed."""
    pieces = sentencepiece_vocabulary(False)
    merges, scores = _merges(pieces.tokenizer.model), [0.0] * len(pieces.tokens)
    return replace(pieces, model="gemma4", merges=merges, scores=scores, add_bos=True)
