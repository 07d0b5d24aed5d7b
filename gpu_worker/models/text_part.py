"""Models that also see or hear: where the configuration of their text part is, and the names of its tensors.

Such a checkpoint is served as the decoder of text that it holds. The weights of its towers are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
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


def _fixed(kind: str, place: tuple[str, ...] = _TEXT) -> Wrapper:
    return Wrapper(kind, is_fixed=True, place=place)


WRAPPERS: Mapping[str, Wrapper] = {
    "AyaVisionForConditionalGeneration": Wrapper("cohere2"),
    "Cohere2VisionForConditionalGeneration": Wrapper("cohere2"),
    "DeepseekVLForConditionalGeneration": Wrapper("llama"),
    "DeepseekVLHybridForConditionalGeneration": Wrapper("llama"),
    "Exaone4_5_ForConditionalGeneration": _fixed("exaone4"),
    "FastVlmForConditionalGeneration": Wrapper("qwen2"),
    "Gemma3ForConditionalGeneration": _fixed("gemma3_text"),
    "Gemma4ForConditionalGeneration": _fixed("gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": _fixed("gemma4_unified_text"),
    "Glm46VForConditionalGeneration": Wrapper("glm4v_text"),
    "Glm4vForConditionalGeneration": _fixed("glm4v_text"),
    "Glm4vMoeForConditionalGeneration": _fixed("glm4v_moe_text"),
    "GlmAsrForConditionalGeneration": Wrapper("llama"),
    "Granite4VisionForConditionalGeneration": _fixed("granite4_vision_text"),
    "GraniteSpeechForConditionalGeneration": Wrapper("granite"),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Wrapper("hyperclovax"),
    "Idefics2ForConditionalGeneration": Wrapper("mistral"),
    "Idefics3ForConditionalGeneration": Wrapper("llama"),
    "InternVLChatModel": Wrapper("qwen2", place=("llm_config",)),
    "InternVLForConditionalGeneration": Wrapper("qwen2"),
    "JanusForConditionalGeneration": Wrapper("llama"),
    "Kimi_K25ForConditionalGeneration": _fixed("deepseek_v3"),
    "KimiK25ForConditionalGeneration": _fixed("deepseek_v3"),
    "KimiVLForConditionalGeneration": _fixed("deepseek_v3"),
    "Lfm2VlForConditionalGeneration": _fixed("lfm2"),
    "LightOnOcrForConditionalGeneration": Wrapper("qwen3"),
    "Llama4ForConditionalGeneration": _fixed("llama4_text"),
    "LlavaForConditionalGeneration": Wrapper("llama"),
    "LlavaNextForConditionalGeneration": Wrapper("llama"),
    "LlavaNextVideoForConditionalGeneration": Wrapper("llama"),
    "LlavaOnevisionForConditionalGeneration": Wrapper("qwen2"),
    "MiniCPMV4_6ForConditionalGeneration": Wrapper("qwen3_5_text"),
    "MiniCPMV4_7ForConditionalGeneration": Wrapper("qwen3_5_text"),
    "Mistral3ForConditionalGeneration": Wrapper("mistral"),
    "Ovis2ForConditionalGeneration": Wrapper("qwen2"),
    "Qwen2_5_VLForConditionalGeneration": _fixed("qwen2_5_vl_text"),
    "Qwen2_5OmniForConditionalGeneration": _fixed("qwen2_5_omni_text", _THINKER),
    "Qwen2_5OmniModel": _fixed("qwen2_5_omni_text", _THINKER),
    "Qwen2_5OmniThinkerForConditionalGeneration": _fixed("qwen2_5_omni_text"),
    "Qwen2AudioForConditionalGeneration": Wrapper("qwen2"),
    "Qwen2VLForConditionalGeneration": _fixed("qwen2_vl_text"),
    "Qwen3_5ForConditionalGeneration": _fixed("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": _fixed("qwen3_5_moe_text"),
    "Qwen3OmniMoeForConditionalGeneration": _fixed("qwen3_omni_moe_text", _THINKER),
    "Qwen3OmniMoeThinkerForConditionalGeneration": _fixed("qwen3_omni_moe_text"),
    "Qwen3VLForConditionalGeneration": _fixed("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": _fixed("qwen3_vl_moe_text"),
    "SmolVLMForConditionalGeneration": Wrapper("llama"),
    "VideoLlama3ForConditionalGeneration": Wrapper("qwen2"),
    "VideoLlavaForConditionalGeneration": Wrapper("llama"),
    "VipLlavaForConditionalGeneration": Wrapper("llama"),
    "VoxtralForConditionalGeneration": Wrapper("llama"),
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
_TOWERS = (
    r"(model\.)?(high_res_)?(vision|visual|image|video|audio|speech|multi_modal|mm_|embed_vision|embed_audio)\w*(\..*)?",
    r"(model\.)?(aligner|connector|encoder|merger|mlp1|patch_merger|\w*projectors?|qformer|resampler)(\..*)?",
    r"(model\.)?(generation_\w+|vqmodel)\..*",
    r"(talker|token2wav|code2wav)\..*",
)
_ROPES = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
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
    defaults = dict(kind.defaults)
    if text.names() & _ROPES:
        # What a checkpoint says of its rotation is said whole.
        defaults.pop("rope_parameters", None)
    fields = {**defaults, **outer, **inner, **tied, "model_type": name}
    if kind.splits_hidden and fields.get("head_dim") is None:
        whole = JsonFile(file.path, fields, _prefix(wrapper))
        fields["head_dim"] = whole.integer("hidden_size") // whole.integer("num_attention_heads")
    return JsonFile(file.path, fields, _prefix(wrapper)), kind


def _prefix(wrapper: Wrapper) -> str:
    return "".join(f"{name}." for name in wrapper.place)


def with_text_names(config: ModelConfig) -> ModelConfig:
    """Return a decoder whose tensors may also have the names that they have in a text part, with towers unused."""
    if config.is_bidirectional:
        return config
    names = config.block.names
    names = replace(names, renamed=_RENAMED + names.renamed, unused=_TOWERS + names.unused)
    return replace(config, block=replace(config.block, names=names))
