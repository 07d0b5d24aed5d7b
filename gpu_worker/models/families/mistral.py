"""Mistral: one sliding window for all layers, or none. Mistral Small 3 is served without its vision tower."""

from __future__ import annotations

from types import MappingProxyType

from gpu_worker.models.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.families import ministral3, mistral4
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.text_part import text_names, text_part

ARCHITECTURE = "MistralForCausalLM"
ALSO = ("Mistral3ForConditionalGeneration",)

# What a text part means that does not say it.
_TEXT = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
)
# Newer text parts in models of the same name.
_OTHERS = MappingProxyType({"ministral3": ministral3.read_config, "mistral4": mistral4.read_config})


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. An absent window is the first release's 4096; null is none."""
    if (kind := file.nested("text_config")) is not None:
        model_type = kind.text("model_type", "mistral")
        if model_type in _OTHERS:
            return _OTHERS[model_type](file)
        if model_type != "mistral":
            problem = f"is {model_type[:80]!r}; supported: 'mistral', {', '.join(map(repr, _OTHERS))}"
            raise kind.error("model_type", problem)
    file, windows = text_part(file, _TEXT), None
    if not file.is_null("sliding_window"):
        windows = (file.integer("sliding_window", 4096),) * file.integer("num_hidden_layers", maximum=1024)
    block = BlockTraits(names=text_names(TensorNames()))
    return read_decoder(file, FamilyTraits(ARCHITECTURE, layer_windows=windows, block=block))
