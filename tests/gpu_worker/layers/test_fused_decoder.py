"""The fused decoder against the same weights computed operation by operation.

Which layers the fused kernels take: those of known forms, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs

from gpu_worker.layers.attention import AttentionShape, AttentionWeights, HeadNorm
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.fused_decoder import FusedDecoder, can_fuse
from gpu_worker.layers.layer import LayerNorms, LayerTraits, LayerWeights
from gpu_worker.layers.layer_packing import can_pack
from gpu_worker.layers.layer_source import Projections
from gpu_worker.layers.layered_decoder import LayeredDecoder
from gpu_worker.layers.linear import LayerParts, Projection
from gpu_worker.layers.media_inputs import MediaInputs
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape, GatedWeights, PlainShape
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import Embedding
from gpu_worker.models.json_file import CheckpointError
from kernels.activation import Activation
from kernels.activation.experts import RELU_SQUARED
from kernels.cpu_library import cpu_library
from kernels.decoder_stack import StackShape
from kernels.linear import LinearFactory
from kernels.linear.forms import INT4, INT8, DenseWeight, GroupQuantizedWeight, ScaledWeight, WeightForm, concatenate
from kernels.moe import RoutingRule
from kernels.rope_kv_write import HeadNormWeights
from tests.kernels.layer_caches import EIGHT_BITS, poisoned_cache
from tests.kernels.poisoned_memory import poisoned_memory

CPU = torch.device("cpu")
SHAPE = StackShape(hidden_size=54, intermediate_size=74, num_heads=6, num_kv_heads=2, head_dim=10, eps=1e-5)
VOCABULARY, NUM_LAYERS, BLOCK = 50, 3, 4
COSINE = {torch.float32: 1 - 1e-6, torch.bfloat16: 0.9995}
# Inputs that are rounded to eight bits may become neighbouring numbers in either form.
COSINE_OF_ROUNDED_INPUTS = 0.9995


def four_bits(weight: torch.Tensor) -> GroupQuantizedWeight:
    """Round to 4 bits in groups of 16, with offsets that are no zero points."""
    columns = F.pad(weight.float(), (0, -weight.shape[1] % 16)).unflatten(1, (-1, 16))
    low = columns.amin(2, keepdim=True)
    scales = (columns.amax(2, keepdim=True) - low) / 15
    codes = ((columns - low) / scales).round().to(torch.uint8).flatten(1)[:, : weight.shape[1]]
    values = codes[:, ::2] | codes[:, 1::2] << 4
    return GroupQuantizedWeight(values, INT4, 16, scales[:, :, 0], low[:, :, 0].contiguous())


def eight_bits(weight: torch.Tensor) -> ScaledWeight:
    """Round to int8, inputs too."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return ScaledWeight((weight / scales).round().to(torch.int8), scales, "dynamic")


def float8(weight: torch.Tensor) -> ScaledWeight:
    """Round to float8."""
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return ScaledWeight((weight / scales).to(torch.float8_e4m3fn), scales)


def unlike_parts(weight: torch.Tensor) -> WeightForm:
    """Take another form for each part of a projection, the dense one among them."""
    rows = len(weight)
    sizes = {100: [60, 20, 20], 148: [74, 74]}.get(rows, [rows])
    forms = (four_bits, DenseWeight, eight_bits)
    return concatenate([form(part) for form, part in zip(forms, weight.split(sizes), strict=False)])


def odd_groups(weight: torch.Tensor) -> GroupQuantizedWeight:
    """Groups that the kernel does not know."""
    columns, rows = weight.shape[1], len(weight)
    scales = torch.full((rows, -(-columns // 6)), 0.04)
    codes = (weight.float() / 0.04 + 128).round().clamp(0, 255).to(torch.uint8)
    return GroupQuantizedWeight(codes, INT8, 6, scales, -128 * scales)


FORMS: dict[str, Callable[[torch.Tensor], WeightForm]] = {
    "dense": DenseWeight,
    "four bits": four_bits,
    "eight bits": eight_bits,
    "float8": float8,
    "parts": unlike_parts,
    "odd groups": odd_groups,
}


@dataclass(frozen=True)
class Variant:
    """What families add to the plain decoder."""

    has_bias: bool = False
    normalises_heads: bool = False
    sliding_window: int | None = None
    form: str = "dense"


def random_layers(variant: Variant, dtype: torch.dtype) -> list[LayerWeights]:
    generator = torch.Generator().manual_seed(3)

    def vector(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator) + 0.5).to(dtype)

    def projection(rows: int, columns: int) -> Projection:
        weight = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)
        return Projection(FORMS[variant.form](weight), vector(rows) if variant.has_bias else None)

    size, inner, dim = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.head_dim
    norm = HeadNormWeights(vector(dim), vector(dim), 1e-5) if variant.normalises_heads else None
    shape = AttentionShape(
        SHAPE.num_heads,
        SHAPE.num_kv_heads,
        dim,
        variant.sliding_window,
        head_norm=HeadNorm.HEADS if variant.normalises_heads else HeadNorm.NONE,
    )
    layers = []
    for _ in range(NUM_LAYERS):
        before_mixer = NormWeights(vector(size), SHAPE.eps)
        qkv = projection((SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * dim, size)
        mixer = AttentionWeights(shape, qkv, projection(size, SHAPE.num_heads * dim), norm)
        before_feed_forward = NormWeights(vector(size), SHAPE.eps)
        feed_forward = GatedWeights(projection(2 * inner, size), projection(size, inner))
        norms = LayerNorms(before_mixer, before_feed_forward=before_feed_forward)
        layers.append(LayerWeights(mixer, feed_forward, norms))
    return layers


def make_decoders(
    variant: Variant, dtype: torch.dtype, taps: tuple[int, ...] = ()
) -> tuple[FusedDecoder, LayeredDecoder]:
    layers = random_layers(variant, dtype)
    embedding = torch.randn(VOCABULARY, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    norm = torch.linspace(0.5, 1.5, SHAPE.hidden_size).to(dtype)
    rotations = Rotations([RopeParameters(RopeType.DEFAULT, 1e4, 64)], 64, CPU)
    table = rotations.of(0, SHAPE.head_dim)
    library = cpu_library()
    assert library is not None, "the tests need g++"
    fused = FusedDecoder(library, SHAPE, Embedding(embedding, dtype), layers, norm, table, taps)
    parts = LayerParts.made_by(LinearFactory(free_host_bytes), rotations)
    return fused, LayeredDecoder(Embedding(embedding, dtype), layers, NormWeights(norm, SHAPE.eps), parts, taps)


def two_prompts(
    dtype: torch.dtype, cache_dtype: torch.dtype | None = None, block_size: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, AttentionContext]:
    """Prompts of 9 and 5 tokens, in one step; whatever no token was written to is NaN."""
    sizes = (6, block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    positions = torch.cat((torch.arange(9), torch.arange(5)))
    tables = torch.tensor([[4, 0, 2], [1, 5, 0]], dtype=torch.int32)
    rows = torch.tensor([0] * 9 + [1] * 5)
    context = AttentionContext(
        [poisoned_cache(*sizes, cache_dtype or dtype, CPU) for _ in range(NUM_LAYERS)],
        tables[rows, positions // block_size].long() * block_size + positions % block_size,
        tables,
        torch.tensor([0, 9, 14], dtype=torch.int32),
        torch.tensor([9, 5], dtype=torch.int32),
        9,
        9,
    )
    return (positions * 7 + rows) % VOCABULARY, positions, context


@pytest.mark.parametrize("dtype", COSINE, ids=str)
@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant(has_bias=True),
        Variant(normalises_heads=True),
        Variant(sliding_window=3),
        *(Variant(has_bias=True, form=form) for form in FORMS if form != "dense"),
    ],
    ids=str,
)
def test_step_equals_the_layered_decoder(variant: Variant, dtype: torch.dtype) -> None:
    fused, layered = make_decoders(variant, dtype)
    tokens, positions, context = two_prompts(dtype)
    _, _, oracle_context = two_prompts(dtype)
    with poisoned_memory():
        result, expected = fused(tokens, positions, context), layered(tokens, positions, oracle_context)
    assert result.dtype is dtype
    is_exact = variant.form in ("dense", "four bits", "float8", "odd groups") or dtype is torch.bfloat16
    lowest = COSINE[dtype] if is_exact else COSINE_OF_ROUNDED_INPUTS
    assert torch.cosine_similarity(result.double(), expected.double(), dim=1).min() > lowest
    for ours, theirs in zip(context.caches, oracle_context.caches, strict=True):
        assert torch.equal(ours.keys.isnan(), theirs.keys.isnan())
        tolerance = 1e-4 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(ours.keys, theirs.keys, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("taps", [(), (1,), (0, 2)], ids=str)
def test_step_with_images_equals_the_layered_decoder_tapped_layers_too(taps: tuple[int, ...]) -> None:
    fused, layered = make_decoders(Variant(), torch.float32, taps)
    tokens, positions, context = two_prompts(torch.float32)
    _, _, oracle_context = two_prompts(torch.float32)
    rows, *deep = torch.randn(3, 3, SHAPE.hidden_size, generator=torch.Generator().manual_seed(5))
    media = MediaInputs(torch.tensor([2, 3, 10]), rows, tuple(deep))
    expected = layered(tokens, positions, structs.replace(oracle_context, media=media))
    result = fused(tokens, positions, structs.replace(context, media=media))
    assert result.shape == (len(tokens), SHAPE.hidden_size * (1 + len(taps)))
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cache_dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("dtype", COSINE, ids=str)
def test_step_on_eight_bits_equals_the_layered_decoder(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    fused, layered = make_decoders(Variant(normalises_heads=True), dtype)
    tokens, positions, context = two_prompts(dtype, cache_dtype)
    _, _, oracle_context = two_prompts(dtype, cache_dtype)
    result, expected = fused(tokens, positions, context), layered(tokens, positions, oracle_context)
    # A key or value in eight bits may be rounded the other way.
    assert torch.cosine_similarity(result.double(), expected.double(), dim=1).min() > 0.999
    for ours, theirs in zip(context.caches, oracle_context.caches, strict=True):
        assert ours.scales is not None
        assert theirs.scales is not None
        assert torch.equal(ours.scales.isnan(), theirs.scales.isnan())
        torch.testing.assert_close(ours.scales, theirs.scales, rtol=0.05, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", [None, *EIGHT_BITS], ids=str)
@pytest.mark.parametrize("dtype", COSINE, ids=str)
def test_transposed_keys_change_no_bit(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    fused, _ = make_decoders(Variant(), dtype)
    tokens, positions, context = two_prompts(dtype, cache_dtype, block_size=16)
    assert context.caches[0].keys.stride(1) == 1
    plain = structs.replace(context, caches=[replace(cache, keys=cache.keys.contiguous()) for cache in context.caches])
    result = fused(tokens, positions, context)
    keys, values = context.caches[0].keys.clone(), context.caches[0].values.clone()
    assert torch.equal(fused(tokens, positions, plain), result)
    for ours, theirs in ((plain.caches[0].keys, keys), (plain.caches[0].values, values)):
        assert torch.equal(ours.float().nan_to_num(), theirs.float().nan_to_num())


def test_padding_tokens_write_nothing_and_change_no_other_row() -> None:
    fused, _ = make_decoders(Variant(), torch.float32)
    tokens, positions, context = two_prompts(torch.float32)
    expected = fused(tokens, positions, context)[:9]
    tokens, positions, context = two_prompts(torch.float32)
    # One block more in front: that is where a write to slot -1 would go.
    whole = torch.full((NUM_LAYERS, 7, BLOCK, SHAPE.num_kv_heads, SHAPE.head_dim), float("nan"))
    padded = structs.replace(
        context, caches=[replace(cache, keys=keys[1:]) for cache, keys in zip(context.caches, whole, strict=True)]
    )
    padded.slot_mapping[9:] = -1
    padded.context_lens[1] = 0
    result = fused(tokens, positions, padded)
    assert torch.equal(result[:9], expected)
    assert result[9:].isfinite().all()
    assert whole[:, 0].isnan().all()
    assert all(cache.values[[1, 5]].isnan().all() for cache in padded.caches)


def test_other_caches_are_noticed() -> None:
    fused, _ = make_decoders(Variant(), torch.float32)
    tokens, positions, first = two_prompts(torch.float32)
    _, _, second = two_prompts(torch.float32)
    assert torch.equal(fused(tokens, positions, first), fused(tokens, positions, second))
    for ours, theirs in zip(first.caches, second.caches, strict=True):
        assert torch.equal(ours.values.nan_to_num(), theirs.values.nan_to_num())


@pytest.mark.parametrize(
    ("token", "position", "problem"), [(-1, 4, "vocabulary"), (VOCABULARY, 4, "vocabulary"), (1, 64, "position")]
)
def test_unknown_token_or_position_beyond_the_table_raises(token: int, position: int, problem: str) -> None:
    fused, _ = make_decoders(Variant(), torch.float32)
    tokens, positions, context = two_prompts(torch.float32)
    tokens[3], positions[13] = token, position
    with pytest.raises(IndexError, match=problem):
        fused(tokens, positions, context)


def test_float16_and_odd_sizes_are_not_fused() -> None:
    assert not can_fuse(SHAPE, torch.float16, CPU)
    assert not can_fuse(replace(SHAPE, hidden_size=53), torch.bfloat16, CPU)


ATTENTION = AttentionShape(4, 2, 16)
GATED = GatedShape(64)
MIXTURE = MixtureShape(8, 32, RoutingRule(2))


@dataclass(frozen=True, slots=True)
class LaterAttention(AttentionShape):
    """A form of attention that was added after the kernels were written."""

    forgets: float = 0.0


@dataclass(frozen=True, slots=True)
class LaterBlock(GatedShape):
    """The same of a feed-forward block."""

    bend: float = 0.0


@pytest.mark.parametrize(
    "traits",
    [
        LayerTraits(ATTENTION, GATED),
        LayerTraits(ATTENTION, MIXTURE),
        LayerTraits(replace(ATTENTION, sliding_window=9, head_norm=HeadNorm.HEADS, qkv_bias=True, by_head=True), GATED),
        LayerTraits(ATTENTION, replace(GATED, has_bias=True, gate_scale=2.0, down_scale=0.5)),
        LayerTraits(ATTENTION, replace(MIXTURE, has_choice_bias=True, rule=RoutingRule(2, score="sigmoid", scale=2.5))),
        LayerTraits(LaterAttention(4, 2, 16), LaterBlock(64)),
    ],
)
def test_known_layer_is_packed(traits: LayerTraits) -> None:
    assert can_pack(traits)


@pytest.mark.parametrize(
    "traits",
    [
        LayerTraits(replace(ATTENTION, rotary=None), GATED),
        LayerTraits(replace(ATTENTION, scale=0.1), GATED),
        LayerTraits(replace(ATTENTION, sees_later=True), GATED),
        LayerTraits(replace(ATTENTION, head_norm=HeadNorm.ROTATED), GATED),
        LayerTraits(ATTENTION, replace(GATED, activation=Activation.GELU_TANH)),
        LayerTraits(ATTENTION, PlainShape(64, Activation.SILU)),
        LayerTraits(ATTENTION, replace(MIXTURE, expert_size=33)),
        LayerTraits(ATTENTION, replace(MIXTURE, shared_size=32)),
        LayerTraits(ATTENTION, replace(MIXTURE, activation=RELU_SQUARED)),
        LayerTraits(ATTENTION, replace(MIXTURE, rule=RoutingRule(2, score="sparse_mixer"))),
        LayerTraits(None, GATED),
        LayerTraits(ATTENTION, None),
    ],
)
def test_layer_that_the_kernels_do_not_compute_is_not_packed(traits: LayerTraits) -> None:
    assert not can_pack(traits)


@pytest.mark.parametrize(
    "traits",
    [LayerTraits(LaterAttention(4, 2, 16, forgets=0.5), GATED), LayerTraits(ATTENTION, LaterBlock(64, bend=0.5))],
)
def test_layer_of_a_form_that_nobody_has_named_is_not_packed(traits: LayerTraits) -> None:
    assert not can_pack(traits)


class Empty:
    """A checkpoint without a tensor of such a size."""

    def take_rows(self, names: list[str], shapes: list[tuple[int, ...]]) -> Any:
        raise CheckpointError(Path("model.safetensors"), f"{names[0]} is not {shapes[0]}")


def test_factors_of_features_that_a_checkpoint_does_not_have_are_not_made() -> None:
    width = 1 << 48
    projections = Projections(Empty())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="up_proj"):
        projections.take(["up_proj"], [width], 64, scales=[(width, 0.5)])
