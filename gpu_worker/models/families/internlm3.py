"""InternLM 3: Llama with heads of a size of their own, whose biases have other names in published configurations."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "InternLM3ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = _bias(file, "attention_bias", "qkv_bias")
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        mlp_bias=_bias(file, "mlp_bias", "bias"),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)


def _bias(file: JsonFile, name: str, published: str) -> bool:
    return file.boolean(name if name in file.names() else published, False)
