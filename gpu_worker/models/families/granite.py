"""IBM's Granite models, dense, with experts, windows or Mamba-2, and HyperCLOVA X, which has their factors."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.rope_scaling import RopeParameters
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, map_attention, read_decoder
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_layer_types, read_windows
from gpu_worker.models.mixture_config import all_layers, read_mixture, with_silu_mixtures
from gpu_worker.models.recurrent_config import read_mamba2, with_mixers


def read_granite(file: JsonFile) -> ModelConfig:
    """Read Granite (dense): Llama with factors on embeddings, attention scores, blocks and logits."""
    return read_decoder(file, granite_traits(file))


def granite_traits(file: JsonFile) -> FamilyTraits:
    """Return the traits that all Granite models share."""
    return FamilyTraits(
        attention=biased(file, AttentionShape(scale=file.number("attention_multiplier", 1.0))),
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(
            embedding_scale=file.number("embedding_multiplier", 1.0),
            residual_scale=file.number("residual_multiplier", 1.0),
            logit_scale=1 / file.number("logits_scaling", 1.0),
        ),
    )


_BLOCK = "block_sparse_moe"
_MIXTURE = MixtureNames(
    router=(f"{_BLOCK}.router.layer", f"{_BLOCK}.router"),
    experts=(f"{_BLOCK}.experts",),
    stacked=(
        (f"{_BLOCK}.input_linear", f"{_BLOCK}.output_linear"),
        (f"{_BLOCK}.experts.gate_up_proj", f"{_BLOCK}.experts.down_proj"),
    ),
    shared="shared_mlp",
    shared_matrices=("input_linear", "output_linear"),
)


def read_granite_moe(file: JsonFile, shared_size: int = 0) -> ModelConfig:
    """Read Granite-MoE and PowerMoE: experts stored as one tensor; a `shared_size` of 0 is not a shared expert."""
    shape = read_mixture(
        file, ("num_local_experts",), 2, score="softmax_after_topk", names=_MIXTURE, shared_size=shared_size
    )
    return with_silu_mixtures(file, read_decoder(file, granite_traits(file)), shape, all_layers(file))


def read_granite_moe_shared(file: JsonFile) -> ModelConfig:
    """Read Granite-MoE with an expert that all tokens get."""
    return read_granite_moe(file, file.integer("shared_intermediate_size", 0, minimum=0))


_THETAS = "layer_rope_theta"


def read_granite_swa(file: JsonFile) -> ModelConfig:
    """Read Granite with windows in three layers of four, sinks in all, and a base of the rotation for each."""
    return with_windows(file, read_decoder(file, replace(granite_traits(file), is_tied=True)))


def with_windows(file: JsonFile, config: ModelConfig) -> ModelConfig:
    """Return a Granite model whose layers have sinks, their window and their rotation."""
    windows = read_windows(file, lambda layer: layer % 4 != 0, default=128)
    assert config.rope is not None
    thetas = _thetas(file, config.rope)
    bases = list(dict.fromkeys(theta for theta in thetas if theta)) or [config.rope.theta]
    ropes = [replace(config.rope, theta=theta) for theta in bases]

    def changed(layer: LayerTraits, window: int | None, theta: float) -> LayerTraits:
        assert isinstance(layer.mixer, AttentionShape)
        rotary = bases.index(theta) if theta else None
        return replace(layer, mixer=replace(layer.mixer, has_sinks=True, sliding_window=window, rotary=rotary))

    layers = tuple(map(changed, config.layers, windows, thetas))
    return replace(config, layers=layers, rope=ropes[0], more_ropes=tuple(ropes[1:]))


def _thetas(file: JsonFile, rope: RopeParameters) -> list[float]:
    """Read the base of each layer; zero is a layer that does not rotate."""
    count = file.integer("num_hidden_layers", maximum=1024)
    thetas = file.fields.get(_THETAS)
    if thetas is None:
        return [rope.theta] * count
    is_list = isinstance(thetas, list) and all(type(theta) in (int, float) for theta in thetas)
    if not is_list or len(thetas) != count or not all(theta == 0 or 1 < theta <= 1e12 for theta in thetas):
        raise file.error(_THETAS, f"must be 0, or above 1, for each of the num_hidden_layers ({count}) layers")
    return [float(theta) for theta in thetas]


def read_granitemoe_swa(file: JsonFile) -> ModelConfig:
    """Read Granite-MoE with the windows, sinks and rotations of its dense sister."""
    shared_size = file.integer("shared_intermediate_size", 0, minimum=0)
    return with_windows(file, read_granite_moe(file, shared_size))


_RECURRENT = ("mamba", "linear_attention")
_KINDS = (*_RECURRENT, "attention", "full_attention")
# Where there are no experts, the expert of all tokens is the layer's block.
_DENSE_NAMES = TensorNames(gate_up=("input_linear",), down="output_linear", renamed=((r"\.shared_mlp\.", ".mlp."),))


def read_granite_moe_hybrid(file: JsonFile) -> ModelConfig:
    """Read Granite 4: Mamba-2 in most layers; experts beside one that all tokens get, or that one alone."""
    config = _read_blocks(file, file.integer("shared_intermediate_size", 1024))
    if file.fields.get("position_embedding_type") != "rope":
        config = map_attention(config, lambda shape: replace(shape, rotary=None))
    name = "layer_types" if "layer_types" in file.names() else "layers_block_type"
    types = read_layer_types(file, _KINDS, lambda layer: _RECURRENT[0], name)
    if set(types).isdisjoint(_RECURRENT):
        return config
    return with_mixers(config, types, dict.fromkeys(_RECURRENT, read_mamba2(file)))


def _read_blocks(file: JsonFile, shared_size: int) -> ModelConfig:
    if file.integer("num_local_experts", 8, minimum=0) > 0:
        return read_granite_moe(file, shared_size)
    config = read_decoder(file, replace(granite_traits(file), inner_size=shared_size))
    return replace(config, block=replace(config.block, names=_DENSE_NAMES))


_NAMES = TensorNames(after_mixer="post_norm1", after_feed_forward="post_norm2")


def read_hyperclovax(file: JsonFile) -> ModelConfig:
    """Read HyperCLOVA X: a normalisation behind each block too, and logits that are multiplied."""
    traits = granite_traits(file)
    assert traits.attention is not None
    attention = traits.attention
    if "attention_multiplier" not in file.names():
        attention = replace(attention, scale=None)
    names = _NAMES if file.boolean("use_post_norm", True) else TensorNames()
    block = replace(traits.block, names=names, logit_scale=file.number("logits_scaling", 1.0))
    return read_decoder(file, replace(traits, attention=attention, block=block))


FAMILIES = (
    Family("GraniteForCausalLM", read_granite),
    Family("GraniteMoeForCausalLM", read_granite_moe),
    Family("GraniteMoeSharedForCausalLM", read_granite_moe_shared),
    Family("GraniteSWAForCausalLM", read_granite_swa, defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    Family("GraniteMoeSWAForCausalLM", read_granitemoe_swa),
    Family(
        "GraniteMoeHybridForCausalLM",
        read_granite_moe_hybrid,
        {"mamba_n_heads": 8, "mamba_d_state": 64, "layer_types": ["mamba"] * 7 + ["attention"]},
    ),
    Family("HyperCLOVAXForCausalLM", read_hyperclovax),
)
