"""The special tokens that a tokenizer's files name, by names such as `eos_token`, as `transformers` reads them.

A file `special_tokens_map.json` goes before `tokenizer_config.json`, except where that has `added_tokens_decoder`, as
all have that were written in the last years. What neither names, the tokenizer's class may. A model's own names, such
as `image_token`, are fields of these files or stand in `extra_special_tokens`. Tokens that `tokenizer.json` lacks are
added to it, and text is split at them.

Source: `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__`, of transformers 5.24.

The special tokens that a tokenizer's class brings along, where the model's files name none.

Source: `__init__` of each class, and `AutoTokenizer.from_pretrained`, of transformers 5.24; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gpu_worker.text.model_directory import ModelDirectory, read_json
from shared.errors import ConfigError

_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_COHERE = {
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "unk_token": "<UNK>",
    "sep_token": "<SEP>",
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "mask_token": "<MASK_TOKEN>",
}
_GEMMA = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CODE_LLAMA = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
_END = "<|endoftext|>"
_GPT2 = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_QWEN = {"eos_token": _END, "unk_token": _END, "pad_token": _END}

DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "BertTokenizer": _BERT,
    "CodeGenTokenizer": _GPT2,
    "CodeLlamaTokenizer": _LLAMA | _CODE_LLAMA,
    "CohereTokenizer": _COHERE,
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": _GPT2 | {"pad_token": "<|padding|>"},
    "GemmaTokenizer": _GEMMA,
    "LlamaTokenizer": _LLAMA,
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _ROBERTA,
}

_PLAIN = "TokenizersBackend"
# The class of a kind of model, of those that are served; kinds that are not here have none of their own.
REGISTERED: Mapping[str, str] = {
    kind: name
    for name, kinds in {
        "BertTokenizer": "bert nomic_bert",
        "CohereTokenizer": "aya_vision cohere cohere2",
        "GPT2Tokenizer": "gpt2 hyperclovax_vision_v2 jais2 opt phi starcoder2",
        "GPTNeoXTokenizer": "gpt_neox mamba2 olmoe",
        "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text shieldgemma2",
        "LlamaTokenizer": "idefics2",
        "Qwen2Tokenizer": "internvl lighton_ocr ovis2 qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl "
        "qwen3 qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
        "RobertaTokenizer": "roberta",
        "XLMRobertaTokenizer": "jina_embeddings_v3 xlm-roberta",
        _PLAIN: "ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glmasr granite "
        "granitemoe granitemoehybrid granitemoeshared hyperclovax internlm3 iquestcoder kimi_k25 llava llava_next "
        "mimo_v2_flash minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert "
        "nemotron olmo2 olmo3 phi3 phimoe smolvlm stablelm vipllava voxtral",
    }.items()
    for kind in kinds.split()
}
# Kinds whose published files name a wrong class: their own is taken instead.
MISNAMED = frozenset({"hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"})


def default_tokens(model_type: str, named: str | None, *, is_byte_level: bool) -> Mapping[str, str]:
    """Return the special tokens of the class that `transformers` takes for a model.

    Args:
        model_type: Of `config.json`.
        named: The class that the model's files name, if any.
        is_byte_level: Its `tokenizer.json` works on bytes, which the class of Llama 2 does not.
    """
    registered = REGISTERED.get(model_type)
    if named is None:
        return DEFAULTS.get(registered or _PLAIN, {})
    named = named.removesuffix("Fast")
    if named == "LlamaTokenizer" and is_byte_level and model_type not in MISNAMED:
        return {}
    if registered == _PLAIN or model_type in MISNAMED:
        named = registered or named
    return DEFAULTS.get(named, {})


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
