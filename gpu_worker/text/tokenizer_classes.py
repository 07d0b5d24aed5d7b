"""The special tokens that a tokenizer's class brings along, where the model's files name none.

Source: `__init__` of each class, and `AutoTokenizer.from_pretrained`, of transformers 5.24; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

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
