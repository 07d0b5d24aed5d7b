"""Models that also see or hear: where the configuration of their text part is, and the names of its tensors.

Such a checkpoint is served as the decoder of text that it holds. The weights of its towers are not read.

The kinds of text parts that models have which also see or hear, by the `model_type` of their configuration.

A text part says only what differs from the defaults of its class in `transformers`, sizes included: Gemma 3 4B does not
say how many heads it has. So each kind has those defaults here, as far as its family's reader means something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import with_defaults


@dataclass(frozen=True, slots=True)
class TextKind:
    """One kind of text part, read by the reader of the family `architecture`.

    Attributes:
        defaults: What fields mean that it leaves out.
        splits_hidden: Heads divide `hidden_size`, whatever the family's default.
    """

    architecture: str
    defaults: Mapping[str, Any]
    splits_hidden: bool = False


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def _kind(architecture: str, sizes: Sequence[int | None], *, splits_hidden: bool = False, **more: Any) -> TextKind:
    """Make a kind of its sizes, in the order of `_SIZES`; None is what an absent field means to the reader."""
    given = {name: size for name, size in zip(_SIZES, sizes, strict=True) if size is not None}
    return TextKind(architecture, {**given, **more}, splits_hidden)


_DEEPSEEK_V3: dict[str, Any] = {
    "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_nextn_predict_layers": 1,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_MISTRAL4: dict[str, Any] = {
    "kv_lora_rank": 256, "moe_intermediate_size": 2048, "n_routed_experts": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_GLM4V_MOE: dict[str, Any] = {
    "attention_bias": True, "head_dim": 128, "moe_intermediate_size": 1408, "n_routed_experts": 128,
}  # fmt: skip
_QWEN3_OMNI: dict[str, Any] = {
    "head_dim": 128, "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "rope_theta": 1000000.0,
}  # fmt: skip
_QWEN2_VL = _kind("Qwen2ForCausalLM", (152064, 8192, 29568, 80, 64, 8, 32768), rms_norm_eps=1e-05, rope_theta=1000000.0)

TEXT_KINDS: Mapping[str, TextKind] = {
    "cohere2": _kind("Cohere2ForCausalLM", (256000, 8192, 22528, 40, 64, None, 8192)),
    "deepseek_v3": _kind("DeepseekV3ForCausalLM", (129280, 7168, 18432, 61, 128, None, 4096), **_DEEPSEEK_V3),
    "exaone4": _kind("Exaone4ForCausalLM", (102400, 4096, 16384, 32, 32, None, 2048)),
    "gemma3_text": _kind("Gemma3ForCausalLM", (262208, 2304, 9216, 26, 8, 4, 131072)),
    "gemma4_text": _kind("Gemma4ForCausalLM", (262144, 2304, 9216, 30, 8, 4, 131072)),
    "gemma4_unified_text": _kind(
        "Gemma4ForCausalLM", (262144, 2304, 9216, 30, 8, 4, 262144), sliding_window=1024, hidden_size_per_layer_input=0,
    ),
    "glm4v_moe_text": _kind("Glm4MoeForCausalLM", (151424, 4096, 10944, 46, 96, 8, 65536), **_GLM4V_MOE),
    "glm4v_text": _kind(
        "Glm4ForCausalLM", (151552, 4096, 13696, 40, 32, 2, 32768), splits_hidden=True, rms_norm_eps=1e-05,
    ),
    "gpt_oss": _kind(
        "GptOssForCausalLM", (201088, 2880, 2880, 36, 64, 8, 131072), num_local_experts=128,
    ),
    "granite": _kind("GraniteForCausalLM", (32000, 4096, 11008, 32, 32, None, 2048)),
    "granite4_vision_text": _kind("GraniteForCausalLM", (32000, 4096, 11008, 32, 32, None, 2048)),
    "hyperclovax": _kind("HyperCLOVAXForCausalLM", (32000, 4096, 11008, 32, 32, None, 2048)),
    "lfm2": _kind("Lfm2ForCausalLM", (65536, 2560, 12288, 32, 32, 8, 128000), rope_theta=1000000.0),
    "llama": _kind("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, None, 2048)),
    "llama4_text": _kind(
        "Llama4ForCausalLM", (202048, 5120, 8192, 48, 40, 8, 131072), num_local_experts=16,
    ),
    "ministral3": _kind("Ministral3ForCausalLM", (131072, 4096, 14336, 34, 32, 8, 262144), rms_norm_eps=1e-05),
    "mistral": _kind("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 131072)),
    "mistral4": _kind("Mistral4ForCausalLM", (131072, 4096, 12288, 36, 32, None, 1048576), **_MISTRAL4),
    "phi3": _kind("Phi3ForCausalLM", (32064, 3072, 8192, 32, 32, None, 4096)),
    "qwen2": _kind("Qwen2ForCausalLM", (151936, 4096, 22016, 32, 32, None, 32768)),
    "qwen2_5_omni_text": _kind("Qwen2ForCausalLM", (152064, 3584, 18944, 28, 28, 4, 32768), rope_theta=1000000.0),
    "qwen2_5_vl_text": _QWEN2_VL, "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _kind("Qwen3ForCausalLM", (151936, 4096, 22016, 32, 32, None, 32768)),
    "qwen3_5_moe_text": _kind(
        "Qwen3_5MoeForCausalLM", (248320, 2048, None, 40, 16, 2, 32768), moe_intermediate_size=512, num_experts=256,
        shared_expert_intermediate_size=512,
    ),
    "qwen3_5_text": _kind("Qwen3_5ForCausalLM", (248320, 4096, 12288, 32, 16, 4, 32768)),
    "qwen3_moe": _kind(
        "Qwen3MoeForCausalLM", (151936, 2048, 6144, 24, 32, 4, 32768), moe_intermediate_size=768, num_local_experts=128,
    ),
    "qwen3_omni_moe_text": _kind("Qwen3MoeForCausalLM", (3584, 2048, 18944, 28, 28, 4, 32768), **_QWEN3_OMNI),
    "qwen3_vl_moe_text": _kind(
        "Qwen3MoeForCausalLM", (151936, 2048, 5632, 24, 16, 16, 128000), moe_intermediate_size=1408,
        num_experts_per_tok=4, num_local_experts=60, rope_theta=500000.0,
    ),
    "qwen3_vl_text": _kind("Qwen3ForCausalLM", (151936, 4096, 22016, 32, 32, None, 128000), rope_theta=500000.0),
}  # fmt: skip
"""All kinds that are served."""


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
