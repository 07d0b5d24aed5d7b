"""Decodes whose products round their inputs: the kernel before a product rounds them where it can, to the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from triton.runtime.interpreter import GridExecutor

from gpu_worker.layers.attention import AttentionShape, AttentionWeights
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer import LayerNorms, LayerWeights
from gpu_worker.layers.layered_decoder import LayeredDecoder
from gpu_worker.layers.linear import LayerParts, Linear, Projection
from gpu_worker.layers.mlp import GatedWeights
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import Embedding
from kernels.activation import Activation
from kernels.activation.triton_kernel import gated_triton
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.layer_cache import LayerCache
from kernels.linear import LinearFactory
from kernels.linear.forms import ScaledWeight, SplitWeight, WeightForm
from kernels.paged_attention.triton_attention import PagedAttentionBatch, paged_attention_triton
from kernels.rms_norm.triton_kernel import rms_norm_triton
from kernels.rope_kv_write.triton_kernel import rope_kv_write_triton
from tests.kernels.conftest import patched_interpreter

__all__ = ["patched_interpreter"]
GPU = Gpu(GpuGeneration.HOPPER, 132)
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
SIZE, INNER, HEADS, KV_HEADS, DIM, NUM_LAYERS = 256, 384, 4, 2, 64, 2
DTYPE = torch.float16
# Of a layer: two normalisations, rotation, attention of a short context, activation, four products.
UNROUNDED = 9


def scaled(
    weight: torch.Tensor, dtype: torch.dtype, *, is_static: bool = False, has_blocks: bool = False
) -> WeightForm:
    shape = (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) if has_blocks else (len(weight), 1)
    values = (weight * 500).clamp(-120, 120).to(dtype)
    given = torch.tensor(0.03) if is_static else None
    return ScaledWeight(values, torch.full(shape, 1 / 500), "static" if is_static else "dynamic", given)


def apart(weight: torch.Tensor) -> WeightForm:
    """Parts that are not one matrix, whose inputs are rounded alike."""
    upper, lower = weight.chunk(2)
    return SplitWeight((scaled(upper, FLOAT8), scaled(lower, FLOAT8)))


FORMS: dict[str, Callable[[torch.Tensor], WeightForm]] = {
    "int8": lambda weight: scaled(weight, INT8),
    "int8 static": lambda weight: scaled(weight, INT8, is_static=True),
    "fp8": lambda weight: scaled(weight, FLOAT8),
    "fp8 static": lambda weight: scaled(weight, FLOAT8, is_static=True),
    "fp8 blocks": lambda weight: scaled(weight, FLOAT8, has_blocks=True),
    "fp8 apart": apart,
}


@pytest.fixture(autouse=True)
def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every operation take its Triton kernels, on the CPU."""

    def attend(*args: Any) -> torch.Tensor:
        *tensors, most, _, options, _ = args
        return paged_attention_triton(PagedAttentionBatch(*tensors, options), most, GPU)

    operations: dict[str, Callable[..., Any]] = {
        "rms_norm.dispatch.rms_norm_reference": rms_norm_triton,
        "activation.dispatch.gated_reference": gated_triton,
        "rope_kv_write.dispatch.rope_kv_write_reference": rope_kv_write_triton,
        "paged_attention.dispatch.paged_attention_reference": attend,
        "linear.gpu_scaled.matrix.has_kernels": lambda _: True,
        "linear.gpu_scaled.matrix.has_float8": lambda _: True,
    }
    for room in ("rms_norm", "activation", "rope_kv_write", "paged_attention"):
        operations[f"{room}.dispatch.cpu_library"] = lambda: None
    operations["linear.gpu_scaled.dispatch.gpu_of"] = lambda _: GPU
    for name, operation in operations.items():
        monkeypatch.setattr(f"kernels.{name}", operation)
    # Before the compiled kernels of a CPU are asked, which would take the matrices.
    monkeypatch.setattr("kernels.linear.factory.pack_quantized_weight", lambda *_: None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    call = GridExecutor.__call__

    def count(self: GridExecutor, *args: Any, **named: Any) -> Any:
        counts[self.fn.__name__] += 1
        return call(self, *args, **named)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    return counts


def decoder(form: Callable[[torch.Tensor], WeightForm], activation: Activation) -> LayeredDecoder:
    generator = torch.Generator().manual_seed(5)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    def projection(rows: int, columns: int) -> Projection:
        return Projection(form(random(rows, columns) * columns**-0.5))

    def norm() -> NormWeights:
        return NormWeights((1 + 0.2 * random(SIZE)).to(DTYPE), 1e-5)

    layers = []
    for _ in range(NUM_LAYERS):
        qkv, output = projection((HEADS + 2 * KV_HEADS) * DIM, SIZE), projection(SIZE, HEADS * DIM)
        block = GatedWeights(projection(2 * INNER, SIZE), projection(SIZE, INNER), activation)
        norms = LayerNorms(norm(), before_feed_forward=norm())
        layers.append(LayerWeights(AttentionWeights(AttentionShape(HEADS, KV_HEADS, DIM), qkv, output), block, norms))
    rotations = Rotations([RopeParameters(RopeType.DEFAULT, 1e4, 64)], 64, torch.device("cpu"))
    parts = LayerParts.made_by(LinearFactory(free_host_bytes), rotations)
    return LayeredDecoder(Embedding(random(40, SIZE).to(DTYPE), DTYPE), layers, norm(), parts)


def decode(model: LayeredDecoder, observer: Callable[..., None] | None = None) -> torch.Tensor:
    """Return the hidden vectors of two sequences' next tokens."""
    generator = torch.Generator().manual_seed(6)
    caches = []
    for _ in range(NUM_LAYERS):
        keys, values = torch.randn(2, 4, 16, KV_HEADS, DIM, generator=generator).to(DTYPE)
        caches.append(LayerCache(keys, values))
    context = AttentionContext(
        caches,
        slot_mapping=torch.tensor([20, 40]),
        block_tables=torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        context_lens=torch.tensor([21, 9], dtype=torch.int32),
        max_query_len=1,
        max_context_len=21,
        observer=observer,
    )
    return model(torch.tensor([7, 9]), torch.tensor([20, 8]), context)


@pytest.mark.parametrize(
    ("form", "activation"),
    [
        *((form, Activation.SILU) for form in FORMS),
        ("int8", Activation.GELU_TANH),
        *(pytest.param(form, Activation.GELU_TANH, marks=pytest.mark.slow) for form in FORMS if form != "int8"),
    ],
)
def test_decode_rounds_in_one_launch_a_layer_to_the_bits_of_four(
    form: str, activation: Activation, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(FORMS[form], activation)
    result = decode(model)
    num_rounding, num_launches = launched["quantize_tokens_kernel"], launched.total()
    launched.clear()
    monkeypatch.setattr(Linear, "rounding", lambda *_: None)
    expected = decode(model)

    assert torch.equal(result, expected)
    # Attention cannot round for the output projection: its programs have a head each, and a scale is of all.
    assert num_rounding == NUM_LAYERS
    assert launched["quantize_tokens_kernel"] == 4 * NUM_LAYERS
    # Those of parts of a matrix are two products.
    products = 4 * NUM_LAYERS if form == "fp8 apart" else 0
    assert num_launches == (UNROUNDED + 1) * NUM_LAYERS + 1 + products
    assert launched.total() == (UNROUNDED + 4) * NUM_LAYERS + 1 + products


def test_inputs_that_are_observed_are_not_rounded_before(launched: Counter[str]) -> None:
    """Calibration is given what a layer multiplies, in 16 bits."""
    decode(decoder(FORMS["fp8"], Activation.SILU), observer=lambda modules, x: None)
    assert launched["quantize_tokens_kernel"] == 4 * NUM_LAYERS
