"""Decoders in GGUF metadata: the fields for their families' readers, and the overrides of the configurations made.

The format has fewer fields than `config.json`. What an architecture alone says comes from the family's own reader; the
file's tensors tell which biases, normalisations and sinks there are. Weights of Gemma's normalisations are not less one
here, and rotations pair what llama.cpp's do: its converters add the one, and put the rows of some families in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer import FeedForwardShape, LayerTraits, MixerShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape, PlainShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType, score_scale
from gpu_worker.layers.rotations import QueryGrowth
from gpu_worker.models.config import DTYPES as TYPES
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.deepseek import MAX_KEY_DIM, MAX_LATENT_DIM
from gpu_worker.models.gguf_fields import DTYPES, MAX_HEADS, Fields, ModelFields, read_gguf_rope, with_this_rope
from gpu_worker.models.gguf_mixture import expert_fields, finish_mixture
from gpu_worker.models.layer_types import FULL, SLIDING
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES

_LATENT = "deepseek2"
_MIXTRAL = "MixtralForCausalLM"
# Where the file may name a window: of each group of this size the last layer has none. 1 is a window in all layers.
_WINDOW_PERIODS: Mapping[str, int] = {
    **{"llama": 1, "gpt-oss": 2, "gemma2": 2, "gemma3": 6, "phi3": 1, "olmo2": 4, "exaone4": 4, "cohere2": 4},
    **{"exaone-moe": 4, "mellum": 4, "phimoe": 1},
}
# Where the file may name fewer dimensions that turn than a head has.
_TURN_IN_PART = frozenset(
    {"phi3", "glm4", "glm4moe", "chatglm", "minimax-m2", "nemotron", "phi2", "gptneox", "stablelm"}
)
# Where logits are divided by the factor that the file names, not multiplied.
_DIVIDE_LOGITS = frozenset({"granite", "granitemoe"})
# The format has no field for it: the largest Gemma of a generation is known by the number of its layers. Its scores are
# scaled by the width of the stream divided by the heads.
_LARGEST_GEMMAS: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}


def decoder_fields(gguf: ModelFields) -> Fields:
    """Read a decoder's fields, each by all the names that families have for it."""
    if not gguf.boolean("rope.scaling.finetuned", True) and gguf.prefix in ("granite", "granitemoe"):
        raise gguf.error("rope.scaling.finetuned", "is false; supported: Granite whose layers rotate")
    experts = expert_fields(gguf)
    windows = _read_windows(gguf)
    width = next((window for window in windows if window is not None), None)
    says_parallel = gguf.prefix != "stablelm" and gguf.boolean("use_parallel_residual", True)
    return {
        "architectures": [_reader(gguf.prefix, has_experts=bool(experts))],
        **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"), gguf.eps),
        "intermediate_size": gguf.integer("feed_forward_length"),
        **(_latent_fields(gguf) if gguf.prefix == _LATENT else _head_fields(gguf)),
        **({} if width is None else {"layer_types": [FULL if window is None else SLIDING for window in windows]}),
        "sliding_window": width,
        # Of StableLM, converters guess it where the checkpoint did not say it.
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in gguf.tensors or says_parallel,
        **experts,
    }


def _reader(prefix: str, *, has_experts: bool) -> str:
    """Return the family whose reader reads files of an architecture that is of several."""
    if prefix == "llama":
        return _MIXTRAL if has_experts else "MistralForCausalLM"
    if prefix == _LATENT and not has_experts:
        return "YoutuForCausalLM"
    return "Olmo3ForCausalLM" if prefix == "olmo2" else ARCHITECTURES[prefix]


def _head_fields(gguf: ModelFields) -> Fields:
    num_heads = gguf.integer("attention.head_count", maximum=MAX_HEADS)
    num_kv_heads = _read_kv_heads(gguf, num_heads)
    head_dim = _read_head_dim(gguf, num_heads)
    _read_rotary_dim(gguf, head_dim)
    share = gguf.turning_share(head_dim)
    return {"num_key_value_heads": num_kv_heads, "head_dim": head_dim, "partial_rotary_factor": share}


def _latent_fields(gguf: ModelFields) -> Fields:
    """Read the sizes of attention by latent vectors.

    Files of newer converters name the sizes of the kept vectors in `key_length` and `value_length`, and those of heads
    beside them; older ones name those of heads.
    """

    def head_size(part: str, maximum: int) -> tuple[str, int]:
        field = f"attention.{part}_length"
        field = f"{field}_mla" if f"{field}_mla" in gguf else field
        return field, gguf.integer(field, maximum=maximum)

    growth = "attention.temperature_scale"
    if gguf.is_other_than(growth, 0.0):
        raise gguf.error(growth, "is set; latent attention is served without queries that grow with their position")
    turning = "rope.dimension_count"
    rotary_dim = gguf.integer(turning, maximum=MAX_KEY_DIM)
    if rotary_dim % 2:
        raise gguf.error(turning, f"is {rotary_dim}; rotary embeddings need an even number")
    field, key_size = head_size("key", 2 * MAX_KEY_DIM)
    if key_size <= rotary_dim:
        raise gguf.error(field, f"is {key_size}; it must be above {_LATENT}.{turning} ({rotary_dim})")
    rank, latent = "attention.q_lora_rank", "attention.kv_lora_rank"
    latent_dim = gguf.integer(latent, maximum=MAX_LATENT_DIM)
    if latent_dim + rotary_dim > MAX_KEY_DIM:
        problem = f"and rope.dimension_count are {latent_dim + rotary_dim} together; attention takes up to"
        raise gguf.error(latent, f"{problem} {MAX_KEY_DIM}")
    return {
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_size - rotary_dim,
        "v_head_dim": head_size("value", MAX_LATENT_DIM)[1],
        "kv_lora_rank": latent_dim,
        "q_lora_rank": gguf.integer(rank) if rank in gguf else None,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in gguf.tensors,
    }


def finish_decoder(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Put what the file's metadata and tensors say over what the family's reader has made."""
    windows = _read_windows(gguf)
    latent = config.layers[0].mixer
    rotary_dim = latent.rotary_dim if isinstance(latent, LatentShape) else _read_rotary_dim(gguf, config.head_dim)
    rope = read_gguf_rope(gguf, rotary_dim, config.max_model_len)
    layers = tuple(
        LayerTraits(_mixer(gguf, layer.mixer, window, rope), _feed_forward(gguf, layer.feed_forward))
        for layer, window in zip(config.layers, windows, strict=True)
    )
    shapes = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionShape)]
    dense = gguf.tensors.get("blk.0.attn_output.weight")
    config = replace(
        config,
        architecture=_MIXTRAL if config.architecture == _MIXTRAL else ARCHITECTURES[gguf.prefix],
        intermediate_size=gguf.integer("feed_forward_length"),
        num_kv_heads=shapes[0].num_kv_heads if shapes else config.num_kv_heads,
        layers=layers,
        dtype=TYPES["bfloat16" if dense is None else DTYPES.get(dense.type, "bfloat16")],
        block=_block(gguf, config.block),
        more_ropes=_window_ropes(gguf, rope) if any(shape.rotary == 1 for shape in shapes) else (),
    )
    return with_this_rope(gguf, config, rope)


def _block(gguf: ModelFields, block: BlockTraits) -> BlockTraits:
    """Return how layers are put together, and the factors around them; tensors have the names of `tensor_names`."""
    names = replace(block.names, renamed=(), unused=())
    if block.is_parallel and "blk.0.ffn_norm.weight" not in gguf.tensors:
        names = replace(names, before_feed_forward=None)
    logits = gguf.number("logit_scale", 1.0)
    return replace(
        block,
        norm=replace(block.norm, is_offset=False),
        names=names,
        has_head_bias="output.bias" in gguf.tensors,
        residual_scale=gguf.number("residual_scale", 1.0),
        embedding_scale=gguf.number("embedding_scale", block.embedding_scale),
        logit_scale=1 / logits if gguf.prefix in _DIVIDE_LOGITS else logits,
        logit_soft_cap=gguf.optional_number("final_logit_softcapping"),
    )


def _feed_forward(gguf: ModelFields, shape: FeedForwardShape | None) -> FeedForwardShape | None:
    if isinstance(shape, MixtureShape):
        return finish_mixture(gguf, shape)
    assert isinstance(shape, GatedShape | PlainShape)
    inner_size = gguf.integer("feed_forward_length")
    return replace(shape, inner_size=inner_size, has_bias="blk.0.ffn_up.bias" in gguf.tensors)


def _mixer(gguf: ModelFields, shape: MixerShape | None, window: int | None, rope: RopeParameters) -> MixerShape:
    if isinstance(shape, LatentShape):
        return replace(shape, scale=(shape.plain_dim + shape.rotary_dim) ** -0.5 * score_scale(rope))
    assert isinstance(shape, AttentionShape)
    tensors, head_dim = gguf.tensors, shape.head_dim
    rotary_dim = _read_rotary_dim(gguf, head_dim)
    has_windows = any(other is not None for other in _read_windows(gguf))
    return replace(
        shape,
        num_kv_heads=_read_kv_heads(gguf, shape.num_heads),
        sliding_window=window,
        # Families whose layers with a window alone rotate do so where there are windows.
        rotary=0 if gguf.prefix in _WINDOW_PERIODS and not has_windows else shape.rotary,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        scale=_read_scale(gguf, shape.num_heads),
        soft_cap=gguf.optional_number("attn_logit_softcapping"),
        head_norm=_read_head_norm(gguf, shape),
        has_sinks="blk.0.attn_sinks.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        query_growth=_read_growth(gguf),
        qkv_clip=_read_clip(gguf),
        # Converters put all queries first.
        by_head=False,
    )


def _read_head_norm(gguf: ModelFields, shape: AttentionShape) -> HeadNorm:
    norm = gguf.tensors.get("blk.0.attn_q_norm.weight")
    if norm is None:
        return HeadNorm.NONE
    if len(norm.shape) > 1:
        # Of each head by itself, as Command R+ and StableLM 2 12B have it.
        return HeadNorm.APART
    if norm.shape != (shape.head_dim,):
        return HeadNorm.WHOLE
    return HeadNorm.ROTATED if shape.head_norm is HeadNorm.ROTATED else HeadNorm.HEADS


def _window_ropes(gguf: ModelFields, rope: RopeParameters) -> tuple[RopeParameters, ...]:
    """Read the rotation of layers with a window, which is another one than `rope`, that of the others."""
    field = "rope.freq_base_swa"
    theta = gguf.number(field, 10_000.0 if gguf.prefix == "gemma3" else rope.theta)
    if theta <= 1:
        raise gguf.error(field, f"is {theta:g}; it must be above 1")
    return (RopeParameters(RopeType.DEFAULT, theta, rope.original_max_len),)


def _read_kv_heads(gguf: ModelFields, num_heads: int) -> int:
    """Read how many key heads all layers have: one number, or the same for each."""
    field = "attention.head_count_kv"
    value = gguf.fields.get(field)
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" and (value == value[0]).all():
        num_kv_heads = int(value[0])
    else:
        num_kv_heads = gguf.integer(field, num_heads, maximum=MAX_HEADS)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        problem = f"is {num_kv_heads}; it must divide {gguf.prefix}.attention.head_count ({num_heads})"
        raise gguf.error(field, problem)
    return num_kv_heads


def _read_head_dim(gguf: ModelFields, num_heads: int) -> int:
    """Read the size of a head, of keys and of values."""
    field = "attention.key_length"
    hidden_size = gguf.integer("embedding_length")
    if field not in gguf and hidden_size % num_heads:
        problem = f"is {hidden_size}; it must be a multiple of {gguf.prefix}.attention.head_count ({num_heads})"
        raise gguf.error("embedding_length", problem)
    head_dim = gguf.integer(field, max(1, hidden_size // num_heads), minimum=4, maximum=1024)
    if head_dim % 2:
        raise gguf.error(field, f"is {head_dim}; rotary embeddings need an even number")
    values = "attention.value_length"
    if gguf.integer(values, head_dim) != head_dim:
        raise gguf.error(values, f"is {gguf.integer(values)}; supported: the size of a key, {head_dim}")
    return head_dim


def _read_rotary_dim(gguf: ModelFields, head_dim: int) -> int:
    """Read how many dimensions of a head rotate."""
    field = "rope.dimension_count"
    rotary_dim = gguf.integer(field, head_dim)
    if rotary_dim == head_dim:
        return rotary_dim
    if gguf.prefix not in _TURN_IN_PART:
        raise gguf.error(field, f"is {rotary_dim}; supported: the size of a key, {head_dim}")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise gguf.error(field, f"is {rotary_dim}; it must be an even number up to the size of a key, {head_dim}")
    return rotary_dim


def _read_scale(gguf: ModelFields, num_heads: int) -> float | None:
    if _LARGEST_GEMMAS.get(gguf.prefix) == gguf.num_layers:
        default = float((gguf.integer("embedding_length") // num_heads) ** -0.5)
        return gguf.number("attention.scale", default)
    return gguf.optional_number("attention.scale")


def _read_clip(gguf: ModelFields) -> float | None:
    """Read what bounds queries, keys and values; converters may write zero for nothing."""
    field = "attention.clamp_kqv"
    return gguf.number(field) if gguf.is_other_than(field, 0.0) else None


def _read_growth(gguf: ModelFields) -> QueryGrowth | None:
    """Read by how much queries grow with their position, from the length of the first training on."""
    field = "attention.temperature_scale"
    if field not in gguf:
        return None
    return QueryGrowth(gguf.number(field), gguf.integer("rope.scaling.original_context_length"))


def _read_windows(gguf: ModelFields) -> tuple[int | None, ...]:
    """Read each layer's window."""
    field = "attention.sliding_window"
    count = gguf.num_layers
    # Converters write zero where a model that could have a window has none.
    window = gguf.integer(field, 0, minimum=0)
    if window == 0:
        return (None,) * count
    if gguf.prefix not in _WINDOW_PERIODS:
        raise gguf.error(field, f"is set; supported: in files of architecture {', '.join(_WINDOW_PERIODS)}")
    return tuple(window if slides else None for slides in _read_pattern(gguf, _WINDOW_PERIODS[gguf.prefix], count))


def _read_pattern(gguf: ModelFields, default: int, count: int) -> list[bool]:
    """Read which layers have the window: the file may name a period, or say it of each layer."""
    field = "attention.sliding_window_pattern"
    if isinstance(gguf.fields.get(field), list | np.ndarray):
        return [bool(value) for value in gguf.numbers(field, count)]
    period = gguf.integer(field, default)
    return [period == 1 or (layer + 1) % period != 0 for layer in range(count)]
