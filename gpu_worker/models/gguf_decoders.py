"""What GGUF metadata say about decoders: what their families' readers are given, and what is put over what they make.

The format has fewer fields than `config.json`. What an architecture alone says comes from the family's own reader; the
file's tensors tell which biases, normalisations and sinks there are. Weights of Gemma's normalisations are not less one
here, and rotations pair what llama.cpp's do: its converters add the one, and put the rows of some families in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.gated_mlp import GatedShape
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer import FeedForwardShape, LayerTraits, MixerShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.plain_mlp import PlainShape
from gpu_worker.layers.query_growth import QueryGrowth
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType, score_scale
from gpu_worker.models.config import DTYPES as TYPES
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.deepseek import MAX_KEY_DIM, MAX_LATENT_DIM
from gpu_worker.models.gguf_fields import DTYPES, MAX_HEADS, Fields, num_layers, read_eps, with_this_rope
from gpu_worker.models.gguf_mixture import expert_fields, finish_mixture
from gpu_worker.models.gguf_rope import read_gguf_rope
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES

_LATENT = "deepseek2"
_MIXTRAL = "MixtralForCausalLM"
# Where the file may name a window: of so many layers the last one has none. 1 is a window in all layers.
_WINDOW_PERIODS: Mapping[str, int] = MappingProxyType(
    {"llama": 1, "gpt-oss": 2, "gemma2": 2, "gemma3": 6, "phi3": 1, "olmo2": 4, "exaone4": 4, "cohere2": 4}
    | {"exaone-moe": 4, "mellum": 4, "phimoe": 1}
)
# Where the file may name fewer dimensions that turn than a head has.
_TURN_IN_PART = frozenset(
    {"phi3", "glm4", "glm4moe", "chatglm", "minimax-m2", "nemotron", "phi2", "gptneox", "stablelm"}
)
# Where logits are divided by the factor that the file names, not multiplied.
_DIVIDE_LOGITS = frozenset({"granite", "granitemoe"})
# The format has no field for it: the largest Gemma of a generation is known by the number of its layers. Its scores are
# scaled by the width of the stream divided by the heads.
_LARGEST_GEMMAS: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})
_FULL, _SLIDING = "full_attention", "sliding_attention"


def decoder_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read a decoder's fields, each by all the names that families have for it.

    Raises:
        GGUFError: A field is malformed, or not supported.
    """
    metadata, eps = file.metadata, read_eps(file, prefix)
    if not metadata.boolean(f"{prefix}.rope.scaling.finetuned", True) and prefix in ("granite", "granitemoe"):
        raise metadata.error(f"{prefix}.rope.scaling.finetuned", "is false; supported: Granite whose layers rotate")
    experts = expert_fields(file, prefix)
    windows = _read_windows(file, prefix)
    width = next((window for window in windows if window is not None), None)
    says_parallel = prefix != "stablelm" and metadata.boolean(f"{prefix}.use_parallel_residual", True)
    return {
        "architectures": [_reader(prefix, has_experts=bool(experts))],
        **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"), eps),
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        **(_latent_fields(file) if prefix == _LATENT else _head_fields(file, prefix)),
        **({} if width is None else {"layer_types": [_FULL if window is None else _SLIDING for window in windows]}),
        "sliding_window": width,
        # Of StableLM, converters guess it where the checkpoint did not say it.
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors or says_parallel,
        **experts,
    }


def _reader(prefix: str, *, has_experts: bool) -> str:
    """Return the family whose reader reads files of an architecture that is of several."""
    if prefix == "llama":
        return _MIXTRAL if has_experts else "MistralForCausalLM"
    if prefix == _LATENT and not has_experts:
        return "YoutuForCausalLM"
    return "Olmo3ForCausalLM" if prefix == "olmo2" else ARCHITECTURES[prefix]


def _head_fields(file: GGUFFile, prefix: str) -> Fields:
    num_heads = file.metadata.integer(f"{prefix}.attention.head_count", maximum=MAX_HEADS)
    num_kv_heads = _read_kv_heads(file, prefix, num_heads)
    head_dim = _read_head_dim(file, prefix, num_heads)
    # Half a dimension more, so that the product is not rounded below the number.
    share = min(1.0, (_read_rotary_dim(file, prefix, head_dim) + 0.5) / head_dim)
    return {"num_key_value_heads": num_kv_heads, "head_dim": head_dim, "partial_rotary_factor": share}


def _latent_fields(file: GGUFFile) -> Fields:
    """Read the sizes of attention by latent vectors.

    Files of newer converters name the sizes of the kept vectors in `key_length` and `value_length`, and those of heads
    beside them; older ones name those of heads.
    """
    metadata = file.metadata

    def head_size(part: str, maximum: int) -> tuple[str, int]:
        field = f"{_LATENT}.attention.{part}_length"
        field = f"{field}_mla" if f"{field}_mla" in metadata else field
        return field, metadata.integer(field, maximum=maximum)

    growth = f"{_LATENT}.attention.temperature_scale"
    if metadata.is_other_than(growth, 0.0):
        raise metadata.error(growth, "is set; latent attention is served without queries that grow with their position")
    turning = f"{_LATENT}.rope.dimension_count"
    rotary_dim = metadata.integer(turning, maximum=MAX_KEY_DIM)
    if rotary_dim % 2:
        raise metadata.error(turning, f"is {rotary_dim}; rotary embeddings need an even number")
    field, key_size = head_size("key", 2 * MAX_KEY_DIM)
    if key_size <= rotary_dim:
        raise metadata.error(field, f"is {key_size}; it must be above {turning} ({rotary_dim})")
    rank, latent = f"{_LATENT}.attention.q_lora_rank", f"{_LATENT}.attention.kv_lora_rank"
    latent_dim = metadata.integer(latent, maximum=MAX_LATENT_DIM)
    if latent_dim + rotary_dim > MAX_KEY_DIM:
        problem = f"and rope.dimension_count are {latent_dim + rotary_dim} together; attention takes up to"
        raise metadata.error(latent, f"{problem} {MAX_KEY_DIM}")
    return {
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_size - rotary_dim,
        "v_head_dim": head_size("value", MAX_LATENT_DIM)[1],
        "kv_lora_rank": latent_dim,
        "q_lora_rank": metadata.integer(rank) if rank in metadata else None,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensors,
    }


def finish_decoder(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Put what the file's metadata and tensors say over what the family's reader has made.

    Raises:
        GGUFError: Numbers make no sense, or a tensor is not supported.
    """
    metadata, windows = file.metadata, _read_windows(file, prefix)
    latent = config.layers[0].mixer
    rotary_dim = (
        latent.rotary_dim if isinstance(latent, LatentShape) else _read_rotary_dim(file, prefix, config.head_dim)
    )
    rope = read_gguf_rope(file, prefix, rotary_dim, config.max_model_len)
    layers = tuple(
        LayerTraits(_mixer(file, prefix, layer.mixer, window, rope), _feed_forward(file, prefix, layer.feed_forward))
        for layer, window in zip(config.layers, windows, strict=True)
    )
    shapes = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionShape)]
    dense = file.tensors.get("blk.0.attn_output.weight")
    config = replace(
        config,
        architecture=_MIXTRAL if config.architecture == _MIXTRAL else ARCHITECTURES[prefix],
        intermediate_size=metadata.integer(f"{prefix}.feed_forward_length"),
        num_kv_heads=shapes[0].num_kv_heads if shapes else config.num_kv_heads,
        layers=layers,
        dtype=TYPES["bfloat16" if dense is None else DTYPES.get(dense.type, "bfloat16")],
        block=_block(file, prefix, config.block),
        more_ropes=_window_ropes(file, prefix, rope) if any(shape.rotary == 1 for shape in shapes) else (),
    )
    return with_this_rope(file, prefix, config, rope)


def _block(file: GGUFFile, prefix: str, block: BlockTraits) -> BlockTraits:
    """Return how layers are put together, and the factors around them; tensors have the names of `tensor_names`."""
    metadata = file.metadata
    names = replace(block.names, renamed=(), unused=())
    if block.is_parallel and "blk.0.ffn_norm.weight" not in file.tensors:
        names = replace(names, before_feed_forward=None)
    logits = metadata.number(f"{prefix}.logit_scale", 1.0)
    return replace(
        block,
        norm=replace(block.norm, is_offset=False),
        names=names,
        has_head_bias="output.bias" in file.tensors,
        residual_scale=metadata.number(f"{prefix}.residual_scale", 1.0),
        embedding_scale=metadata.number(f"{prefix}.embedding_scale", block.embedding_scale),
        logit_scale=1 / logits if prefix in _DIVIDE_LOGITS else logits,
        logit_soft_cap=_optional(file, f"{prefix}.final_logit_softcapping"),
    )


def _feed_forward(file: GGUFFile, prefix: str, shape: FeedForwardShape | None) -> FeedForwardShape | None:
    if isinstance(shape, MixtureShape):
        return finish_mixture(file, prefix, shape)
    assert isinstance(shape, GatedShape | PlainShape)
    inner_size = file.metadata.integer(f"{prefix}.feed_forward_length")
    return replace(shape, inner_size=inner_size, has_bias="blk.0.ffn_up.bias" in file.tensors)


def _mixer(
    file: GGUFFile, prefix: str, shape: MixerShape | None, window: int | None, rope: RopeParameters
) -> MixerShape:
    """Return a layer's attention with what the file says of it."""
    if isinstance(shape, LatentShape):
        return replace(shape, scale=(shape.plain_dim + shape.rotary_dim) ** -0.5 * score_scale(rope))
    assert isinstance(shape, AttentionShape)
    tensors, head_dim = file.tensors, shape.head_dim
    rotary_dim = _read_rotary_dim(file, prefix, head_dim)
    has_windows = any(other is not None for other in _read_windows(file, prefix))
    return replace(
        shape,
        num_kv_heads=_read_kv_heads(file, prefix, shape.num_heads),
        sliding_window=window,
        # Families whose layers with a window alone rotate do so where there are windows.
        rotary=0 if prefix in _WINDOW_PERIODS and not has_windows else shape.rotary,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        scale=_read_scale(file, prefix, shape.num_heads),
        soft_cap=_optional(file, f"{prefix}.attn_logit_softcapping"),
        head_norm=_read_head_norm(file, shape),
        has_sinks="blk.0.attn_sinks.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        query_growth=_read_growth(file, prefix),
        qkv_clip=_read_clip(file, prefix),
        # Converters put all queries first.
        by_head=False,
    )


def _read_head_norm(file: GGUFFile, shape: AttentionShape) -> HeadNorm:
    norm = file.tensors.get("blk.0.attn_q_norm.weight")
    if norm is None:
        return HeadNorm.NONE
    if len(norm.shape) > 1:
        # Of each head by itself, as Command R+ and StableLM 2 12B have it.
        return HeadNorm.APART
    if norm.shape != (shape.head_dim,):
        return HeadNorm.WHOLE
    return HeadNorm.ROTATED if shape.head_norm is HeadNorm.ROTATED else HeadNorm.HEADS


def _window_ropes(file: GGUFFile, prefix: str, rope: RopeParameters) -> tuple[RopeParameters, ...]:
    """Read the rotation of layers with a window, which is another one than `rope`, that of the others."""
    field = f"{prefix}.rope.freq_base_swa"
    theta = file.metadata.number(field, 10_000.0 if prefix == "gemma3" else rope.theta)
    if theta <= 1:
        raise file.metadata.error(field, f"is {theta:g}; it must be above 1")
    return (RopeParameters(RopeType.DEFAULT, theta, rope.original_max_len),)


def _read_kv_heads(file: GGUFFile, prefix: str, num_heads: int) -> int:
    """Read how many key heads all layers have: one number, or the same for each.

    Raises:
        GGUFError: Layers differ, or the query heads cannot share them.
    """
    metadata, field = file.metadata, f"{prefix}.attention.head_count_kv"
    value = metadata.fields.get(field)
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" and (value == value[0]).all():
        num_kv_heads = int(value[0])
    else:
        num_kv_heads = metadata.integer(field, num_heads, maximum=MAX_HEADS)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        problem = f"is {num_kv_heads}; it must divide {prefix}.attention.head_count ({num_heads})"
        raise metadata.error(field, problem)
    return num_kv_heads


def _read_head_dim(file: GGUFFile, prefix: str, num_heads: int) -> int:
    """Read the size of a head, of keys and of values.

    Raises:
        GGUFError: It cannot be, or values have another one.
    """
    metadata, field = file.metadata, f"{prefix}.attention.key_length"
    hidden_size = metadata.integer(f"{prefix}.embedding_length")
    if field not in metadata and hidden_size % num_heads:
        problem = f"is {hidden_size}; it must be a multiple of {prefix}.attention.head_count ({num_heads})"
        raise metadata.error(f"{prefix}.embedding_length", problem)
    head_dim = metadata.integer(field, max(1, hidden_size // num_heads), minimum=4, maximum=1024)
    if head_dim % 2:
        raise metadata.error(field, f"is {head_dim}; rotary embeddings need an even number")
    values = f"{prefix}.attention.value_length"
    if metadata.integer(values, head_dim) != head_dim:
        raise metadata.error(values, f"is {metadata.integer(values)}; supported: the size of a key, {head_dim}")
    return head_dim


def _read_rotary_dim(file: GGUFFile, prefix: str, head_dim: int) -> int:
    """Read how many dimensions of a head turn.

    Raises:
        GGUFError: The family does not have so many.
    """
    metadata, field = file.metadata, f"{prefix}.rope.dimension_count"
    rotary_dim = metadata.integer(field, head_dim)
    if rotary_dim == head_dim:
        return rotary_dim
    if prefix not in _TURN_IN_PART:
        raise metadata.error(field, f"is {rotary_dim}; supported: the size of a key, {head_dim}")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise metadata.error(field, f"is {rotary_dim}; it must be an even number up to the size of a key, {head_dim}")
    return rotary_dim


def _read_scale(file: GGUFFile, prefix: str, num_heads: int) -> float | None:
    if _LARGEST_GEMMAS.get(prefix) == num_layers(file, prefix):
        default = float((file.metadata.integer(f"{prefix}.embedding_length") // num_heads) ** -0.5)
        return file.metadata.number(f"{prefix}.attention.scale", default)
    return _optional(file, f"{prefix}.attention.scale")


def _optional(file: GGUFFile, field: str) -> float | None:
    return file.metadata.number(field) if field in file.metadata else None


def _read_clip(file: GGUFFile, prefix: str) -> float | None:
    """Read what bounds queries, keys and values; converters may write zero for nothing."""
    field = f"{prefix}.attention.clamp_kqv"
    return file.metadata.number(field) if file.metadata.is_other_than(field, 0.0) else None


def _read_growth(file: GGUFFile, prefix: str) -> QueryGrowth | None:
    """Read by how much queries grow with their position, from the length of the first training on."""
    metadata, field = file.metadata, f"{prefix}.attention.temperature_scale"
    if field not in metadata:
        return None
    return QueryGrowth(metadata.number(field), metadata.integer(f"{prefix}.rope.scaling.original_context_length"))


def _read_windows(file: GGUFFile, prefix: str) -> tuple[int | None, ...]:
    """Read each layer's window.

    Raises:
        GGUFError: The file names a window, which the family does not have, or not one pattern for all layers.
    """
    metadata, field = file.metadata, f"{prefix}.attention.sliding_window"
    count = num_layers(file, prefix)
    # Converters write zero where a model that could have a window has none.
    window = metadata.integer(field, 0, minimum=0)
    if window == 0:
        return (None,) * count
    if prefix not in _WINDOW_PERIODS:
        raise metadata.error(field, f"is set; supported: in files of architecture {', '.join(_WINDOW_PERIODS)}")
    return tuple(window if slides else None for slides in _read_pattern(file, prefix, _WINDOW_PERIODS[prefix], count))


def _read_pattern(file: GGUFFile, prefix: str, default: int, count: int) -> list[bool]:
    """Read which layers have the window: the file may name a period, or say it of each layer."""
    metadata, field = file.metadata, f"{prefix}.attention.sliding_window_pattern"
    if isinstance(metadata.fields.get(field), list | np.ndarray):
        return [bool(value) for value in metadata.numbers(field, count)]
    period = metadata.integer(field, default)
    return [period == 1 or (layer + 1) % period != 0 for layer in range(count)]
