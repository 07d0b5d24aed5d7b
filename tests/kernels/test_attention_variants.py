"""Every variant of attention in every implementation: the reference against the definition, kernels against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.paged_attention import AttentionOptions, paged_attention
from kernels.paged_attention.dispatch import can_run, paged_attention_cpu
from tests.kernels.attention_variants import OPTIONS, QUERIES, Options, attend_by_definition, batch_of, run_reference
from tests.kernels.paged_batch import Shape, make_batch, make_sequence
from tests.kernels.poisoned_memory import poisoned_memory

FORMS = {
    "same": Shape(4, 2, 24, 5),
    "values of another size": Shape(6, 2, 24, 4, value_dim=16),
    "larger values": Shape(4, 1, 16, 4, value_dim=40),
    "latent": Shape(4, 1, 36, 4, value_dim=32, is_latent=True),
    "strided": Shape(4, 2, 24, 4, is_strided=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_reference_equals_definition(shape: Shape, options: Options) -> None:
    lengths, query_lens = QUERIES["mixed"]
    expected = [
        attend_by_definition(make_sequence(length, shape, seed=length), position, shape.head_dim**-0.5, options)
        for length, count in zip(lengths, query_lens, strict=True)
        for position in range(length - count, length)
    ]
    actual = run_reference(batch_of(shape, "mixed"), options)
    torch.testing.assert_close(actual.double(), torch.stack(expected), atol=1e-5, rtol=1e-5)


# What the kernels' tiles and panels make of sizes: large heads, more heads than an item has rows, caches in eight bits.
SIZES = {
    "latent of DeepSeek": Shape(16, 1, 576, 16, torch.bfloat16, None, 512, is_latent=True),
    "large heads": Shape(4, 2, 512, 16),
    "many heads": Shape(40, 1, 576, 8, torch.float32, None, 512, is_latent=True),
    "latent in int8": Shape(6, 1, 72, 8, torch.float32, torch.int8, 64, is_latent=True),
    "values in fp8": Shape(6, 2, 48, 4, torch.float32, torch.float8_e4m3fn, 32, is_strided=True),
    "keys of 192": Shape(4, 4, 192, 16, torch.float16, None, 128),
    "values in int8": Shape(6, 2, 24, 5, torch.bfloat16, torch.int8, 40),
}
FAST = {("latent of DeepSeek", "plain"), ("many heads", "all"), ("latent in int8", "all"), ("values in fp8", "sinks")}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def mostly_slow(fast: set[tuple[str, str]]) -> list[Any]:
    """Every size with every variant; only those named are tested by default."""
    return [
        pytest.param(shape, options, id=f"{size}-{name}", marks=[] if (size, name) in fast else pytest.mark.slow)
        for size, shape in SIZES.items()
        for name, options in OPTIONS.items()
    ]


def check_dispatched(shape: Shape, options: Options) -> None:
    batch = batch_of(shape, "mixed")
    with poisoned_memory():
        actual = paged_attention(*batch.arguments(**options.asked(shape.num_heads)))
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(actual, run_reference(batch, options), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_dispatched_attention_equals_reference(shape: Shape, options: Options) -> None:
    check_dispatched(shape, options)


@pytest.mark.parametrize(("shape", "options"), mostly_slow(FAST))
def test_attention_of_any_size_equals_reference(shape: Shape, options: Options) -> None:
    check_dispatched(shape, options)


@pytest.mark.parametrize(("shape", "options"), [(SIZES["many heads"], OPTIONS["all"]), (FORMS["same"], OPTIONS["all"])])
def test_row_of_a_variant_does_not_depend_on_its_chunk(shape: Shape, options: Options) -> None:
    library = cpu_library()
    assert library is not None, "the tests need g++"

    def run(query_len: int) -> torch.Tensor:
        batch = make_batch([make_sequence(60, shape, seed=60)], [query_len], shape)
        assert can_run(batch.query, batch.cache)
        asked = AttentionOptions(batch.scale, **options.asked(shape.num_heads))
        return paged_attention_cpu(library, *batch.tensors, asked)

    together = run(60)
    for query_len in (1, 2, 7):
        assert torch.equal(run(query_len), together[-query_len:])


def test_sink_of_no_weight_changes_nothing() -> None:
    batch = make_batch([make_sequence(40, FORMS["same"], seed=40)], [20], FORMS["same"])
    none = torch.full((4,), float("-inf"))
    torch.testing.assert_close(paged_attention(*batch.arguments(sinks=none)), paged_attention(*batch.arguments()))
