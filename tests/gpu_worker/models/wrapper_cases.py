"""Small random models that also see or hear, a case each of the wrappers that `transformers` has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.models.variants import randomize

_VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_CLIP = {"model_type": "clip_vision_model", **_VIT}
_SIGLIP = {"model_type": "siglip_vision_model", **_VIT}
_DEEP = {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
_WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8}

_AUDIO = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_AUDIO |= {"num_mel_bins": 8}
_QFORMER = {"model_type": "blip_2_qformer", "intermediate_size": 24, "num_hidden_layers": 1}


@dataclass(frozen=True)
class WrapperCase:
    """A wrapper, by the beginning of its class's name.

    Attributes:
        text: Of its text part, beside the sizes of all.
        options: Of the rest of its configuration.
        logit_scale: What the text part's family multiplies logits by, and the wrapper of `transformers` does not.
    """

    family: str
    text: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    logit_scale: float = 1.0


def save_wrapper(case: WrapperCase, directory: Path) -> Any:
    """Save a random model, and return it: without an image or sound it is the oracle of its text part."""
    import transformers

    text = {**SIZES, **copy.deepcopy(dict(case.text))}
    config = getattr(transformers, f"{case.family}Config")(text_config=text, **copy.deepcopy(dict(case.options)))
    torch.manual_seed(len(repr(case)))
    model_class = getattr(transformers, f"{case.family}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    randomize_text(model)
    model.save_pretrained(directory)
    return model


def oracle_of(case: WrapperCase, model: Any) -> Any:
    """Return what computes the logits of a family's text part, of a model that leaves their scale out."""

    def logits(token_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=model(token_ids, **options).logits * case.logit_scale)

    if case.logit_scale != 1:
        return logits
    # The whole of Llama 4 needs an image in version 5.24; its text part has the head in it.
    return model if hasattr(model, "model") else model.language_model


def randomize_text(model: Any) -> None:
    """Give the text part and the head weights of a spread that matters."""
    # Llama 4's text part has the head in it.
    whole = model if hasattr(model, "model") else model.language_model
    with torch.no_grad():
        randomize(_text_model(whole.model))
        whole.lm_head.weight.normal_(0, 0.3)


def _text_model(model: Any) -> Any:
    found = [getattr(model, name) for name in ("language_model", "text_model") if hasattr(model, name)]
    return found[0] if found else model


def _case(family: str, kind: str, text: Mapping[str, Any] | None = None, **options: Any) -> WrapperCase:
    return WrapperCase(family, {"model_type": kind, **(text or {})}, options)


_GEMMA4 = {
    "head_dim": 20, "global_head_dim": 28, "sliding_window": 9, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 97, "pad_token_id": 0,
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 12, "intermediate_size_mlp": 56, "num_local_experts": 3, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 11,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 3, 2]}
_KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_QWEN3 = {"head_dim": 12}
_QWEN3_5 = {
    "head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
_GLM_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
_GPT_OSS = {
    "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
_QWEN3_MOE = {"head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}

_INTERNVIT = {**_VIT, "image_size": [28, 28], "patch_size": [14, 14]}

WRAPPER_CASES: Mapping[str, WrapperCase] = {
    "gemma3": WrapperCase(
        "Gemma3", {"head_dim": 20, "sliding_window": 9},
        {"vision_config": _VIT, "mm_tokens_per_image": 4, "image_token_index": 96},
    ),
    "gemma4": WrapperCase("Gemma4", _GEMMA4, {"vision_config": _VIT}),
    "llama4": WrapperCase(
        "Llama4", _LLAMA4,
        {"vision_config": {**_VIT, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
    ),
    "mistral3": _case("Mistral3", "mistral", {"head_dim": 12, "sliding_window": None}, vision_config=_VIT),
    "qwen2.5-vl": WrapperCase(
        "Qwen2_5_VL", {"rope_parameters": {**_MROPE, "rope_type": "mrope"}}, {"vision_config": _DEEP},
    ),
    "qwen3-vl": WrapperCase(
        "Qwen3VL", {"head_dim": 12, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}, {"vision_config": _DEEP},
    ),
    "qwen3-vl-moe": WrapperCase(
        "Qwen3VLMoe", {**_QWEN3_MOE, "rope_parameters": _MROPE, "norm_topk_prob": True}, {"vision_config": _DEEP},
    ),
    "exaone4.5": _case(
        "Exaone4_5_", "exaone4", {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 9}, vision_config=_DEEP,
    ),
    "lfm2-vl": WrapperCase(
        "Lfm2Vl", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        {"vision_config": _VIT, "projector_hidden_size": 24},
    ),
    "kimi-k2.5": WrapperCase(
        "Kimi_K25", _KIMI,
        {"vision_config": {name: _VIT[name] for name in list(_VIT)[:4]}, "tie_word_embeddings": False},
    ),
    "llava-llama": _case("Llava", "llama", vision_config=_CLIP),
    "llava-qwen2": _case("Llava", "qwen2", vision_config=_CLIP),
    "llava-mistral": _case("Llava", "mistral", {"sliding_window": None}, vision_config=_CLIP),
    "llava-pixtral": _case(
        "Llava", "mistral", {"head_dim": 20, "sliding_window": None}, vision_config={"model_type": "pixtral", **_VIT},
    ),
    "llava-next": _case("LlavaNext", "mistral", {"sliding_window": 9}, vision_config=_CLIP),
    "llava-next-video": _case("LlavaNextVideo", "llama", vision_config=_CLIP),
    "llava-onevision": _case("LlavaOnevision", "qwen2", {"tie_word_embeddings": True}, vision_config=_SIGLIP),
    "video-llava": _case("VideoLlava", "llama", vision_config=_CLIP),
    "vip-llava": _case("VipLlava", "llama", vision_config=_CLIP, vision_feature_layers=[-1]),
    "internvl-qwen2": _case("InternVL", "qwen2", vision_config=_INTERNVIT),
    "internvl-qwen3": _case("InternVL", "qwen3", _QWEN3, vision_config=_INTERNVIT, tie_word_embeddings=False),
    "internvl-qwen3-moe": _case(
        "InternVL", "qwen3_moe", _QWEN3_MOE, vision_config=_INTERNVIT, tie_word_embeddings=False,
    ),
    "internvl-gpt-oss": _case("InternVL", "gpt_oss", _GPT_OSS, vision_config=_INTERNVIT, tie_word_embeddings=False),
    "idefics2": _case(
        "Idefics2", "mistral", {"sliding_window": None}, vision_config=_VIT,
        perceiver_config={
            "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8,
            "num_key_value_heads": 2,
        },
    ),
    "idefics3": _case("Idefics3", "llama", vision_config=_VIT),
    "smolvlm": _case("SmolVLM", "llama", vision_config=_VIT, tie_word_embeddings=True),
    "deepseek-vl": _case("DeepseekVL", "llama", vision_config=_SIGLIP),
    "lighton-ocr": _case("LightOnOcr", "qwen3", _QWEN3, vision_config={"model_type": "pixtral", **_VIT}),
    "video-llama3": _case("VideoLlama3", "qwen2", vision_config=_VIT),
    "qwen2-audio": _case("Qwen2Audio", "qwen2", audio_config=_WHISPER),
    "voxtral": _case("Voxtral", "llama", audio_config=_AUDIO),
    "aya-vision": WrapperCase(
        "AyaVision", {"model_type": "cohere2", "sliding_window": 9, "logit_scale": 0.5}, {"vision_config": _SIGLIP},
        logit_scale=0.5,
    ),
    "cohere2-vision": WrapperCase(
        "Cohere2Vision", {"model_type": "cohere2", "sliding_window": 9, "logit_scale": 0.5},
        {"vision_config": _SIGLIP, "alignment_intermediate_size": 32}, logit_scale=0.5,
    ),
    "deepseek-vl-hybrid": _case(
        "DeepseekVLHybrid", "llama", vision_config=_SIGLIP,
        high_res_vision_config={
            "model_type": "sam_vision_model", **_VIT, "output_channels": 8, "num_pos_feats": 4,
            "global_attn_indexes": [0], "mlp_dim": 16,
        },
    ),
    "janus": _case(
        "Janus", "llama", vision_config={**_VIT, "num_image_tokens": 4, "projection_dim": 48},
        vq_config={
            "num_embeddings": 8, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1],
            "num_res_blocks": 1, "projection_dim": 48, "image_token_embed_dim": 48,
        },
    ),
    "fast-vlm": _case("FastVlm", "qwen2", vision_config=_CLIP),
    "hyperclovax-vision": _case(
        "HyperCLOVAXVisionV2", "hyperclovax", {"logits_scaling": 0.5},
        vision_config={"model_type": "qwen2_5_vl_vision", **_DEEP, "intermediate_size": 24},
    ),
    "minicpm-v": _case("MiniCPMV4_6", "qwen3_5_text", _QWEN3_5, vision_config={**_VIT, "insert_layer_id": 0}),
    "minicpm-v-4.7": _case("MiniCPMV4_7", "qwen3_5_text", _QWEN3_5, vision_config={**_VIT, "insert_layer_id": 0}),
    "ovis2": _case("Ovis2", "qwen2", vision_config={**_VIT, "vocab_size": 16}),
    "granite-speech": WrapperCase(
        "GraniteSpeech",
        {"model_type": "granite", "logits_scaling": 2.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
        {
            "encoder_config": {"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 4},
            "projector_config": {**_QFORMER, "hidden_size": 16, "num_attention_heads": 2, "encoder_hidden_size": 16},
            "has_lora_adapter": False,
        },
        logit_scale=0.5,
    ),
    "granite4-vision": WrapperCase(
        "Granite4Vision",
        {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
        {
            "vision_config": {**_SIGLIP, "hidden_size": 64}, "image_grid_pinpoints": [[28, 28]],
            "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2",
            "qformer_config": {**_QFORMER, "hidden_size": 64, "num_attention_heads": 1, "encoder_hidden_size": 64},
        },
    ),
    "glm-asr": _case("GlmAsr", "llama", audio_config=_AUDIO),
    "gemma4-unified": WrapperCase(
        "Gemma4Unified",
        {
            "head_dim": 20, "global_head_dim": 28, "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
        },
        {"vision_config": {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}},
    ),
    "glm4v": WrapperCase(
        "Glm4v", {"rope_parameters": _GLM_ROPE}, {"vision_config": {**_DEEP, "intermediate_size": 24}},
    ),
    "glm4.6v": _case(
        "Glm46V", "glm4v_text", {"rope_parameters": _GLM_ROPE},
        vision_config={"model_type": "glm4v_vision", **_DEEP, "intermediate_size": 24},
    ),
    "glm4v-moe": WrapperCase(
        "Glm4vMoe",
        {
            "head_dim": 12, "rope_parameters": _GLM_ROPE, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
        },
        {"vision_config": {**_DEEP, "intermediate_size": 24}},
    ),
    "qwen2.5-omni-thinker": WrapperCase(
        "Qwen2_5OmniThinker", {"rope_parameters": _MROPE},
        {"vision_config": _DEEP, "audio_config": _WHISPER | {"output_dim": 48}},
    ),
    "qwen3-omni-thinker": WrapperCase(
        "Qwen3OmniMoeThinker", {**_QWEN3_MOE, "rope_parameters": _MROPE},
        {"vision_config": _DEEP, "audio_config": _WHISPER | {"output_dim": 48, "downsample_hidden_size": 8}},
    ),
}  # fmt: skip
