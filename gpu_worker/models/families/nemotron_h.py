"""Nemotron-H and Nemotron 3: layers of one block each.

A block is Mamba-2, attention without rotation, a plain block with squared ReLU, or experts of that kind.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mamba2_config import Mamba2Fields, read_mamba2
from gpu_worker.models.mixture_config import grouped_sigmoid_rule, read_num_experts
from kernels.activation.experts import RELU_SQUARED

ARCHITECTURE = "NemotronHForCausalLM"
SAMPLE = {"mamba_num_heads": 8, "ssm_state_size": 64, "hybrid_override_pattern": "M-M*M-M-", "n_groups": 2}

_PATTERN = "hybrid_override_pattern"
_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
NAMES = TensorNames(
    before_mixer="norm",
    before_feed_forward="norm",
    renamed=(
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.mixer\.(up_proj|down_proj|gate|experts|shared_experts|fc\d_latent_proj)\.", r".mlp.\1."),
        (r"\.mixer\.", ".mamba."),
    ),
    unused=(r"mtp\..*",),
)
_EXPERTS = MixtureNames(
    matrices=("up_proj", "down_proj"),
    stacked=(("mlp.experts.up_proj", "mlp.experts.down_proj"),),
    shared="mlp.shared_experts",
    shared_matrices=("up_proj", "down_proj"),
)
_FIELDS = Mamba2Fields(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    num_groups="n_groups",
    state_size="ssm_state_size",
    conv_width="conv_kernel",
    conv_bias="use_conv_bias",
    expand=None,
    input_bias="use_bias",
    output_bias="use_bias",
    activation="mamba_hidden_act",
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    pattern = _read_pattern(file)
    if file.boolean("attention_bias", False):
        raise file.error("attention_bias", "is true; attention of this family is served without biases")
    traits = FamilyTraits(
        ARCHITECTURE,
        num_layers=len(pattern),
        head_dim=file.integer("attention_head_dim", 128, minimum=4, maximum=1024),
        attention=AttentionShape(rotary=None),
        has_feed_forward="-" in pattern,
        is_gated=False,
        mlp_bias=file.boolean("mlp_bias", False),
        activation=read_activation(file, "mlp_hidden_act", "relu2"),
        norm_eps=("layer_norm_epsilon", 1e-5),
        block=BlockTraits(names=NAMES),
    )
    config, mamba2 = read_decoder(file, traits), read_mamba2(file, _FIELDS)
    mixture = _read_mixture(file) if "E" in pattern else None

    def layer(kind: str, plain: LayerTraits) -> LayerTraits:
        match kind:
            case "M":
                return LayerTraits(mamba2, None)
            case "*":
                return LayerTraits(plain.mixer, None)
            case "E":
                return LayerTraits(None, mixture)
            case _:
                return LayerTraits(None, plain.feed_forward)

    return replace(config, layers=tuple(map(layer, pattern, config.layers)))


def _read_pattern(file: JsonFile) -> str:
    """Read the kinds of layers, a letter each: of the pattern, or of a list of names."""
    name = next((name for name in ("layer_types", "layers_block_type") if name in file.names()), None)
    if name is None:
        pattern = file.text(_PATTERN)
    else:
        kinds = file.texts(name)
        if not set(kinds) <= set(_KINDS):
            raise file.error(name, f"is {repr(kinds)[:80]}; its kinds must be among {', '.join(_KINDS)}")
        pattern = "".join(_KINDS[kind] for kind in kinds)
    if not pattern or len(pattern) > 1024 or set(pattern) - set(_KINDS.values()):
        raise file.error(name or _PATTERN, f"is {pattern[:80]!r}; it must have a letter of 'M*-E' for each layer")
    return pattern


def _read_mixture(file: JsonFile) -> MixtureShape:
    """Read the experts, and the one that all tokens get, which is not of their size."""
    activation = file.text("mlp_hidden_act", "relu2")
    if activation != "relu2":
        problem = f"is {activation[:80]!r}; experts of this family are served with 'relu2'"
        raise file.error("mlp_hidden_act", problem)
    num_experts, has_bias = read_num_experts(file, "n_routed_experts"), file.boolean("mlp_bias", False)
    return MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size"),
        grouped_sigmoid_rule(file, num_experts),
        _EXPERTS,
        RELU_SQUARED,
        has_choice_bias=True,
        shared_size=file.integer("moe_shared_expert_intermediate_size", 7688),
        has_shared_biases=has_bias,
        latent_size=file.integer("moe_latent_size", 0, minimum=0),
        has_latent_biases=has_bias,
    )
