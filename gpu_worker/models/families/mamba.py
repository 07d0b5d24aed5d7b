"""Models with Mamba-2: Mamba-2 itself, Bamba, Falcon-H1, Nemotron-H and Nemotron 3."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.attention_beside_mamba2 import AttentionBesideMamba2Shape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.mamba2 import Mamba2Shape, OutputNorm
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import grouped_sigmoid_rule, read_num_experts
from gpu_worker.models.recurrent_config import Mamba2Fields, read_mamba2, with_mixers
from kernels.activation.experts import RELU_SQUARED

# Of Bamba and Falcon-H1.
_BAMBA_NAMES = TensorNames(
    before_feed_forward="pre_ff_layernorm",
    renamed=((r"\.feed_forward\.", ".mlp."), (r"^model\.final_layernorm\.", "model.norm.")),
)


def read_bamba(file: JsonFile) -> ModelConfig:
    """Read Bamba: Mamba-2 in most layers, attention whose heads turn by half in the others."""
    has_bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        attention=AttentionShape(qkv_bias=has_bias, output_bias=has_bias),
        mlp_bias=file.boolean("mlp_bias", False),
        norm_eps=("rms_norm_eps", 1e-5),
        rotary_share=0.5,
        block=BlockTraits(names=_BAMBA_NAMES),
    )
    config, attending = read_decoder(file, traits), file.integers("attn_layer_indices")
    types = tuple("attention" if layer in attending else "mamba" for layer in range(config.num_layers))
    return with_mixers(config, types, {"mamba": read_mamba2(file)})


_NORM, _NORM_FIRST = "mamba_rms_norm", "mamba_norm_before_gate"


def read_falcon_h1(file: JsonFile) -> ModelConfig:
    """Read Falcon-H1: attention and Mamba-2 side by side in every layer, and factors nearly everywhere."""
    block = BlockTraits(
        names=_BAMBA_NAMES,
        embedding_scale=file.number("embedding_multiplier", 1.0),
        logit_scale=file.number("lm_head_multiplier", 1.0),
    )
    has_bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        attention=AttentionShape(qkv_bias=has_bias, output_bias=has_bias),
        mlp_bias=file.boolean("mlp_bias", False),
        norm_eps=("rms_norm_eps", 1e-5),
        block=block,
    )
    config, mamba2 = read_decoder(file, traits), _read_mamba2(file)
    gate_scale, down_scale = _factors(file, "mlp_multipliers", 2)

    def with_both(layer: LayerTraits) -> LayerTraits:
        attention, feed_forward = layer.mixer, layer.feed_forward
        assert isinstance(attention, AttentionShape)
        assert isinstance(feed_forward, GatedShape)
        mixer = AttentionBesideMamba2Shape(_scaled(file, attention), mamba2)
        return LayerTraits(mixer, replace(feed_forward, gate_scale=gate_scale, down_scale=down_scale))

    return replace(config, layers=tuple(map(with_both, config.layers)))


def _read_mamba2(file: JsonFile) -> Mamba2Shape:
    norm = OutputNorm.NONE
    if file.boolean(_NORM, False):
        norm = OutputNorm.BEFORE_GATE if file.boolean(_NORM_FIRST, True) else OutputNorm.AFTER_GATE
    shape = read_mamba2(file, Mamba2Fields(inner_size="mamba_d_ssm", output_bias="projectors_bias"), norm)
    before = file.number("ssm_in_multiplier", 1.0)
    if before != 1 and shape.has_input_bias:
        raise file.error("ssm_in_multiplier", f"is {before:g}; it must be 1 where mamba_proj_bias is true")
    gates, values, inputs, outputs, steps = (before * factor for factor in _factors(file, "ssm_multipliers", 5))
    scales = (gates, values, inputs, outputs, steps)
    return replace(shape, input_scales=scales, output_scale=file.number("ssm_out_multiplier", 1.0))


def _scaled(file: JsonFile, shape: AttentionShape) -> AttentionShape:
    """Return attention whose factors are in its scale of scores, and in that of its results.

    What multiplies its inputs multiplies queries, keys and values: scores twice, and results once.
    """
    before, keys = file.number("attention_in_multiplier", 1.0), file.number("key_multiplier", 1.0)
    if before != 1 and shape.qkv_bias:
        raise file.error("attention_in_multiplier", f"is {before:g}; it must be 1 where attention_bias is true")
    after = before * file.number("attention_out_multiplier", 1.0)
    factor = before * before * keys
    return replace(shape, scale=None if factor == 1 else shape.head_dim**-0.5 * factor, output_scale=after)


def _factors(file: JsonFile, name: str, count: int) -> tuple[float, ...]:
    factors = file.numbers(name) or (1.0,) * count
    if len(factors) != count:
        raise file.error(name, f"has {len(factors)} numbers; it must have {count}")
    return factors


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
_NEMOTRON_H_FIELDS = Mamba2Fields(
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


def read_nemotron_h(file: JsonFile) -> ModelConfig:
    """Read Nemotron-H and Nemotron 3: a layer is Mamba-2, unrotated attention, squared ReLU, or experts."""
    pattern = _read_pattern(file)
    file.require("attention_bias", False, "attention served without biases")
    traits = FamilyTraits(
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
    config, mamba2 = read_decoder(file, traits), read_mamba2(file, _NEMOTRON_H_FIELDS)
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
    file.require("mlp_hidden_act", "relu2")
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


# Where the configuration does not say how long sequences get. Published models have seen 2,048 tokens; no memory grows
# with a sequence, but the scheduler counts its blocks all the same.
_MAX_LEN = 8192
_MAMBA2_FIELDS = Mamba2Fields(
    num_heads="num_heads",
    head_dim="head_dim",
    num_groups="n_groups",
    state_size="state_size",
    conv_width="conv_kernel",
    conv_bias="use_conv_bias",
    expand="expand",
    input_bias="use_bias",
    output_bias="use_bias",
)


def read_mamba2_model(file: JsonFile) -> ModelConfig:
    """Read Mamba-2 itself: one block a layer, no attention anywhere."""
    traits = FamilyTraits(
        attention=None,
        has_feed_forward=False,
        norm_eps=("layer_norm_epsilon", 1e-5),
        block=BlockTraits(names=NAMES),
        max_model_len=file.integer("max_position_embeddings", _MAX_LEN),
    )
    config = read_decoder(file, traits)
    return replace(config, layers=(LayerTraits(read_mamba2(file, _MAMBA2_FIELDS), None),) * config.num_layers)


FAMILIES = (
    Family(
        "BambaForCausalLM",
        read_bamba,
        {"mamba_n_heads": 8, "mamba_d_state": 64, "attn_layer_indices": [2]},
        defaults={"num_key_value_heads": 8},
    ),
    Family(
        "FalconH1ForCausalLM",
        read_falcon_h1,
        {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_state": 64},
        defaults={"num_key_value_heads": 8, "mamba_d_ssm": 1024},
    ),
    Family(
        "NemotronHForCausalLM",
        read_nemotron_h,
        {"mamba_num_heads": 8, "ssm_state_size": 64, "hybrid_override_pattern": "M-M*M-M-", "n_groups": 2},
        defaults={"num_key_value_heads": 8, "n_groups": 8, "num_experts_per_tok": 2},
    ),
    Family(
        "Mamba2ForCausalLM",
        read_mamba2_model,
        {"num_heads": 8, "state_size": 64, "n_groups": 2},
        defaults={"n_groups": 8},
    ),
)
