"""The models that also see or hear, and are served for text: where each has the configuration of its text part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TEXT = ("text_config",)
# Of models that also speak, by a part of their own.
_THINKER = ("thinker_config", *_TEXT)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model around a text part.

    Attributes:
        kind: Of the text part, a name in `TEXT_KINDS`.
        is_fixed: It is always of this kind, whatever it calls itself; else `kind` is what an absent name means.
        place: The fields of the configuration that lead to the text part's own, from outside.
    """

    kind: str
    is_fixed: bool = False
    place: tuple[str, ...] = _TEXT


def _fixed(kind: str, place: tuple[str, ...] = _TEXT) -> Wrapper:
    return Wrapper(kind, is_fixed=True, place=place)


WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
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
)
"""By their name in `architectures`."""
