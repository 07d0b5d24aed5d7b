"""Llama 2 and 3, and models that are Llama but for a few options."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_activation, read_decoder, without_rotation
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_rotating_layers, read_windows
from kernels.activation import Activation


def read_llama(file: JsonFile) -> ModelConfig:
    """Read Llama 2 and 3 and the many models that share their form: the plain decoder, every bias optional."""
    traits = FamilyTraits(attention=biased(file), mlp_bias=file.boolean("mlp_bias", False))
    return read_decoder(file, traits)


_NAMES = TensorNames(before_mixer="attention_layernorm", before_feed_forward="feedforward_layernorm")
_LEARNED = "xielu"


def read_apertus(file: JsonFile) -> ModelConfig:
    """Read Apertus: normalised heads, and a block without a gate whose function (xIELU) each layer has learned."""
    is_learned = file.text("hidden_act", _LEARNED) == _LEARNED
    traits = FamilyTraits(
        attention=biased(file, AttentionShape(head_norm=HeadNorm.HEADS)),
        is_gated=False,
        block=BlockTraits(names=_NAMES),
        activation=Activation.XIELU if is_learned else read_activation(file),
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=12_000_000.0,
    )
    return read_decoder(file, traits)


def read_cwm(file: JsonFile) -> ModelConfig:
    """Read CWM (Meta's Code World Model): a window in all layers but the first and every fourth after it."""
    traits = FamilyTraits(
        head_dim=128,
        mlp_bias=file.boolean("mlp_bias", False),
        layer_windows=read_windows(file, lambda layer: layer % 4 != 0, 8192),
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=1e6,
    )
    return read_decoder(file, traits)


def read_helium(file: JsonFile) -> ModelConfig:
    """Read Helium: Llama whose neighbouring dimensions turn together."""
    traits = FamilyTraits(
        head_dim=128,
        attention=AttentionShape(interleaved=True, qkv_bias=file.boolean("attention_bias", False)),
        mlp_bias=file.boolean("mlp_bias", False),
        norm_eps=("rms_norm_eps", 1e-8),
        rope_theta=100_000.0,
    )
    return read_decoder(file, traits)


def read_internlm3(file: JsonFile) -> ModelConfig:
    """Read InternLM 3; published configurations have other names for its biases."""
    field = "attention_bias" if "attention_bias" in file.names() else "qkv_bias"
    traits = FamilyTraits(
        head_dim=128,
        attention=biased(file, field=field),
        mlp_bias=file.boolean("mlp_bias" if "mlp_bias" in file.names() else "bias", False),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)


def read_iquestcoder(file: JsonFile) -> ModelConfig:
    """Read IQuest-Coder: Llama, without the clipping and windows that its configuration has fields for."""
    if "clip_qkv" in file.names():
        raise file.error("clip_qkv", "is set; supported: null, as in all published checkpoints")
    file.require("use_sliding_window", False, "as in all published checkpoints")
    traits = FamilyTraits(
        head_dim=128, attention=biased(file), mlp_bias=file.boolean("mlp_bias", False), norm_eps=("rms_norm_eps", 1e-5)
    )
    return read_decoder(file, traits)


def read_seed_oss(file: JsonFile) -> ModelConfig:
    """Read Seed-OSS: Llama with biases on queries, keys and values."""
    attention = AttentionShape(
        qkv_bias=file.boolean("attention_bias", True), output_bias=file.boolean("attention_out_bias", False)
    )
    mlp_bias = file.boolean("mlp_bias", False)
    return read_decoder(file, FamilyTraits(head_dim=128, attention=attention, mlp_bias=mlp_bias))


def read_smollm3(file: JsonFile) -> ModelConfig:
    """Read SmolLM3: Llama whose every fourth layer does not rotate."""
    rotates = read_rotating_layers(file)
    windows = None
    if file.boolean("use_sliding_window", False) and "sliding_window" in file.names():
        windows = read_windows(file, lambda layer: not rotates[layer])
    traits = FamilyTraits(
        attention=biased(file),
        mlp_bias=file.boolean("mlp_bias", False),
        layer_windows=windows,
        is_tied=True,
        rope_theta=2e6,
    )
    return without_rotation(read_decoder(file, traits), rotates)


# What Apertus and CWM mean where nothing is said of the rotation.
_LLAMA3_ROPE = {
    "rope_type": "llama3", "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip

FAMILIES = (
    Family("LlamaForCausalLM", read_llama),
    Family(
        "ApertusForCausalLM",
        read_apertus,
        defaults={"rope_parameters": _LLAMA3_ROPE | {"rope_theta": 12_000_000.0, "factor": 8.0}},
    ),
    Family(
        "CwmForCausalLM",
        read_cwm,
        defaults={"num_key_value_heads": 8, "rope_parameters": _LLAMA3_ROPE | {"rope_theta": 1e6, "factor": 16.0}},
    ),
    Family("HeliumForCausalLM", read_helium, defaults={"num_key_value_heads": 20}),
    Family("InternLM3ForCausalLM", read_internlm3, defaults={"num_key_value_heads": 2}),
    Family("IQuestCoderForCausalLM", read_iquestcoder, defaults={"num_key_value_heads": 8}),
    Family("SeedOssForCausalLM", read_seed_oss, defaults={"num_key_value_heads": 8}),
    Family("SmolLM3ForCausalLM", read_smollm3, defaults={"num_key_value_heads": 4}),
)
