"""What a GGUF file's metadata say about attention by latent vectors, DeepSeek's."""

from __future__ import annotations

from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.rope_scaling import RopeParameters, score_scale
from gpu_worker.models.latent_config import MAX_KEY_DIM, MAX_LATENT_DIM
from gpu_worker.quantization.gguf.file import GGUFFile

LATENT = "deepseek2"
"""The architecture of such files."""


def read_gguf_latent(file: GGUFFile, num_heads: int, rope: RopeParameters) -> LatentShape:
    """Read the sizes of the attention of all layers.

    Files of newer converters name the sizes of the kept vectors in `key_length` and `value_length`, and those of heads
    beside them; older ones name those of heads.

    Raises:
        GGUFError: A field is missing, or a size cannot be.
    """
    metadata = file.metadata

    def head_size(part: str, maximum: int) -> tuple[str, int]:
        field = f"{LATENT}.attention.{part}_length"
        field = f"{field}_mla" if f"{field}_mla" in metadata else field
        return field, metadata.integer(field, maximum=maximum)

    growth = f"{LATENT}.attention.temperature_scale"
    if metadata.is_other_than(growth, 0.0):
        raise metadata.error(growth, "is set; latent attention is served without queries that grow with their position")
    rotary_dim = read_latent_rotary_dim(file)
    field, key_size = head_size("key", 2 * MAX_KEY_DIM)
    if key_size <= rotary_dim:
        raise metadata.error(field, f"is {key_size}; it must be above {LATENT}.rope.dimension_count ({rotary_dim})")
    rank = f"{LATENT}.attention.q_lora_rank"
    latent_dim = metadata.integer(f"{LATENT}.attention.kv_lora_rank", maximum=MAX_LATENT_DIM)
    if latent_dim + rotary_dim > MAX_KEY_DIM:
        problem = f"and rope.dimension_count are {latent_dim + rotary_dim} together; attention takes up to"
        raise metadata.error(f"{LATENT}.attention.kv_lora_rank", f"{problem} {MAX_KEY_DIM}")
    return LatentShape(
        num_heads=num_heads,
        query_rank=metadata.integer(rank) if rank in metadata else None,
        latent_dim=latent_dim,
        plain_dim=key_size - rotary_dim,
        rotary_dim=rotary_dim,
        value_dim=head_size("value", MAX_LATENT_DIM)[1],
        scale=key_size**-0.5 * score_scale(rope),
        has_bias="blk.0.attn_kv_a_mqa.bias" in file.tensors,
    )


def read_latent_rotary_dim(file: GGUFFile) -> int:
    """Read how many dimensions of a head turn.

    Raises:
        GGUFError: The field is missing, or its number odd.
    """
    field = f"{LATENT}.rope.dimension_count"
    rotary_dim = file.metadata.integer(field, maximum=MAX_KEY_DIM)
    if rotary_dim % 2:
        raise file.metadata.error(field, f"is {rotary_dim}; rotary embeddings need an even number")
    return rotary_dim
