"""Models that also see or hear: where the configuration of their text part is, and the names of its tensors.

Such a checkpoint is served as the decoder of text that it holds. The weights of its towers are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import with_defaults
from gpu_worker.models.text_kinds import TEXT_KINDS, TextKind

_TEXT = ("text_config",)
# Of models that also speak, by a part of their own.
_THINKER = ("thinker_config", *_TEXT)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model around a text part.

    Attributes:
        kind: A name in `TEXT_KINDS`; unless `is_fixed`, only what an absent name means.
        place: The fields that lead to the text part's configuration, from outside.
    """

    kind: str
    is_fixed: bool = False
    place: tuple[str, ...] = _TEXT


_SEES = "ForConditionalGeneration"
# The models around each kind of text part, by what stands before `ForConditionalGeneration` in their names; where the
# text part says by its `model_type` which kind it is.
_OPEN: Mapping[str, str] = {
    "cohere2": "AyaVision Cohere2Vision", "glm4v_text": "Glm46V", "granite": "GraniteSpeech",
    "hyperclovax": "HyperCLOVAXVisionV2",
    "llama": "DeepseekVL DeepseekVLHybrid GlmAsr Idefics3 Janus Llava LlavaNext LlavaNextVideo "
    "SmolVLM VideoLlava VipLlava Voxtral",
    "mistral": "Idefics2 Mistral3", "qwen2": "FastVlm InternVL LlavaOnevision Ovis2 Qwen2Audio VideoLlama3",
    "qwen3": "LightOnOcr", "qwen3_5_text": "MiniCPMV4_6 MiniCPMV4_7",
}  # fmt: skip
_FIXED: Mapping[str, str] = {
    "deepseek_v3": "Kimi_K25 KimiK25 KimiVL", "exaone4": "Exaone4_5_", "gemma3_text": "Gemma3", "gemma4_text": "Gemma4",
    "gemma4_unified_text": "Gemma4Unified", "glm4v_text": "Glm4v", "glm4v_moe_text": "Glm4vMoe",
    "granite4_vision_text": "Granite4Vision", "lfm2": "Lfm2Vl", "llama4_text": "Llama4",
    "qwen2_5_omni_text": "Qwen2_5OmniThinker", "qwen2_5_vl_text": "Qwen2_5_VL", "qwen2_vl_text": "Qwen2VL",
    "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_omni_moe_text": "Qwen3OmniMoeThinker",
    "qwen3_vl_text": "Qwen3VL", "qwen3_vl_moe_text": "Qwen3VLMoe",
}  # fmt: skip
WRAPPERS: Mapping[str, Wrapper] = {
    **{name + _SEES: Wrapper(kind) for kind, names in _OPEN.items() for name in names.split()},
    **{name + _SEES: Wrapper(kind, is_fixed=True) for kind, names in _FIXED.items() for name in names.split()},
    "InternVLChatModel": Wrapper("qwen2", place=("llm_config",)),
    f"Qwen2_5Omni{_SEES}": Wrapper("qwen2_5_omni_text", True, _THINKER),
    "Qwen2_5OmniModel": Wrapper("qwen2_5_omni_text", True, _THINKER),
    f"Qwen3OmniMoe{_SEES}": Wrapper("qwen3_omni_moe_text", True, _THINKER),
}
"""By their name in `architectures`."""


# Of the layouts of transformers 5, of 4.52 and later, of those before, and of models that were published with code.
_RENAMED = (
    (r"^thinker\.", ""),
    (r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?text_model\.", "model."),
)
# What sees, hears, speaks or draws, and what joins it to the text part.
TOWERS = (
    r"(model\.)?(high_res_)?(vision|visual|image|video|audio|speech|multi_modal|mm_|embed_vision|embed_audio)\w*(\..*)?",
    r"(model\.)?(aligner|connector|encoder|merger|mlp1|patch_merger|\w*projectors?|qformer|resampler)(\..*)?",
    r"(model\.)?(generation_\w+|vqmodel)\..*",
    r"(talker|token2wav|code2wav)\..*",
)
"""Patterns of the tensors that are not of the text part."""
_TIED = "tie_word_embeddings"
_SHARED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", _TIED)


def text_part(file: JsonFile, wrapper: Wrapper) -> tuple[JsonFile, TextKind]:
    """Return the configuration of the text part, and its kind; the whole where nothing is nested in it.

    Fields about the checkpoint as a whole stand outside of the text part in some, and inside in others; whether the
    head is tied is said outside, if anywhere.
    """
    text, outer = file, dict[str, Any]()
    for field in wrapper.place:
        outer |= {name: text.fields[name] for name in _SHARED if text.fields.get(name) is not None}
        nested = text.nested(field)
        if nested is None:
            return file, TEXT_KINDS[wrapper.kind]
        text = nested
    name = wrapper.kind if wrapper.is_fixed else text.text("model_type", wrapper.kind)
    if name not in TEXT_KINDS:
        raise text.error("model_type", f"is {name[:80]!r}; supported: {', '.join(map(repr, TEXT_KINDS))}")
    kind = TEXT_KINDS[name]
    inner = {name: value for name, value in text.fields.items() if value is not None or name not in _SHARED}
    tied = {name: value for name, value in outer.items() if name == _TIED}
    fields = {**outer, **inner, **tied, "model_type": name}
    part = with_defaults(text.with_fields(fields), kind.defaults)
    if kind.splits_hidden and "head_dim" not in part.names():
        head_dim = part.integer("hidden_size") // part.integer("num_attention_heads")
        part = part.with_fields({**part.fields, "head_dim": head_dim})
    return part, kind


def with_text_names(config: ModelConfig) -> ModelConfig:
    """Return a decoder whose tensors may also have the names that they have in a text part, with towers unused."""
    if config.is_bidirectional:
        return config
    names = config.block.names
    names = replace(names, renamed=_RENAMED + names.renamed, unused=TOWERS + names.unused)
    return replace(config, block=replace(config.block, names=names))
