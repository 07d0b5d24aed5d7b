"""What the compiler makes of the Triton kernels, for GPUs that are not here: resources, and the instructions wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import GpuGeneration
from tests.kernels.compile_checks import CAPABILITIES, CompiledKernel, compile_launches, instructions_of
from tests.kernels.published_launches import CHECKED

# Where nothing is compiled yet, the first test of the session waits for a minute of the compiler's work.
pytestmark = pytest.mark.timeout(600)

# Instructions of PTX. Sixteen bytes: of an asynchronous copy, a load and a store.
COPY_16, LOAD_16, STORE_16 = r"cp\.async\.cg", r"ld\.global\S*\.v4", r"st\.global\S*\.v4"
COPY_8_OR_16 = r"cp\.async\.c[ag][^\n]* 0x(?:8|10),"
LOAD, STORE = r"ld\.global", r"st\.global"


def compiled(tmp_path_factory: pytest.TempPathFactory, launches: str) -> list[CompiledKernel]:
    output = tmp_path_factory.mktemp("compiled") / "kernels.json"
    return compile_launches(f"tests.kernels.{launches}", CAPABILITIES, output)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledKernel]:
    return compiled(tmp_path_factory, "attention_launches")


@pytest.fixture(scope="module")
def elementwise(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledKernel]:
    return compiled(tmp_path_factory, "elementwise_launches")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledKernel]:
    return compiled(tmp_path_factory, "attention_launches:eight_bits")


def check_resources(kernels: list[CompiledKernel]) -> None:
    assert {kernel.capability for kernel in kernels} == set(CAPABILITIES)
    for kernel in kernels:
        # Keys and values of different sizes in one tile take all registers of mma.sync.
        kernel.check_fits(32 if (kernel.launch, kernel.capability) == ("chunk_192_128", 80) else 0)


@pytest.mark.compiles
def test_attention_fits_the_gpu(attention: list[CompiledKernel]) -> None:
    check_resources(attention)


def test_elementwise_kernels_fit_the_gpu(elementwise: list[CompiledKernel]) -> None:
    check_resources(elementwise)


@pytest.mark.slow
def test_kernels_over_eight_bits_fit_the_gpu(quantized: list[CompiledKernel]) -> None:
    check_resources(quantized)


@pytest.mark.slow
def test_eight_bits_and_their_scales_are_copied_ahead_of_use(
    attention: list[CompiledKernel], quantized: list[CompiledKernel]
) -> None:
    readers = ("split_attention_kernel", "chunk_attention_kernel")
    loads = {(k.launch, k.kernel, k.capability): k.count(LOAD) for k in attention if k.kernel in readers}
    compared = 0
    for kernel in quantized:
        if kernel.kernel in readers:
            assert kernel.count(COPY_8_OR_16) >= 4, str(kernel)
            # No more is waited for than in 16 bits: the query, of which a smaller tile has less, lengths, and the
            # search for the sequence.
            known = loads.get((kernel.launch.rpartition("_")[0], kernel.kernel, kernel.capability))
            compared += known is not None
            assert known is None or kernel.count(LOAD) <= known, str(kernel)
    # Ampere converts no fp8.
    assert compared == 7 * (2 * len(CAPABILITIES) - 1)


@pytest.mark.slow
def test_fp8_is_converted_by_instruction(quantized: list[CompiledKernel]) -> None:
    converting = [kernel for kernel in quantized if "fp8" in kernel.launch and not kernel.kernel.startswith("reduce")]
    assert len(converting) == 9 * (len(CAPABILITIES) - 1)
    for kernel in converting:
        wanted = (
            r"cvt\.rn\.satfinite\.e4m3x2\.f32" if kernel.kernel == "rope_kv_write_kernel" else r"cvt\.rn\.f16x2\.e4m3x2"
        )
        # Before Hopper the compiler rounds to fp8 by other instructions.
        assert kernel.count(wanted) > 0 or (kernel.capability < 90 and "rope" in kernel.launch), str(kernel)


@pytest.mark.compiles
def test_chunks_multiply_on_the_tensor_cores_of_the_generation(attention: list[CompiledKernel]) -> None:
    chunks = [kernel for kernel in attention if kernel.kernel == "chunk_attention_kernel"]
    assert len(chunks) == 5 * len(CAPABILITIES)
    for kernel in chunks:
        assert kernel.matrix_instructions == instructions_of(kernel.capability), str(kernel)


@pytest.mark.compiles
def test_attention_copies_the_cache_in_16_bytes_ahead_of_use(attention: list[CompiledKernel]) -> None:
    readers = [kernel for kernel in attention if not kernel.kernel.startswith("reduce")]
    assert len(readers) == 11 * len(CAPABILITIES)
    for kernel in readers:
        # Tiles are half as large where a program has less shared memory.
        assert kernel.count(COPY_16) >= (8 if kernel.generation is GpuGeneration.ADA else 16), str(kernel)
        # The query, and the stored result.
        assert kernel.count(LOAD_16) >= 2, str(kernel)
        assert kernel.count(STORE_16) >= 2, str(kernel)


@pytest.mark.compiles
def test_decodes_of_many_are_split_too_as_one_of_them_may_be_long(attention: list[CompiledKernel]) -> None:
    for launch in ("decode_one", "decode_many"):
        launched = {kernel.kernel for kernel in attention if kernel.launch == launch}
        assert launched == {"split_attention_kernel", "reduce_splits_kernel"}


@pytest.mark.compiles
def test_chunks_on_a_long_context_are_split_among_programs(attention: list[CompiledKernel]) -> None:
    launched = {kernel.kernel for kernel in attention if kernel.launch == "chunk_128"}
    assert launched == {"chunk_attention_kernel", "reduce_chunk_splits_kernel"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_variants_of_attention_fit_the_gpu_and_copy_ahead_of_use(tmp_path: Path) -> None:
    compiled = compile_launches("tests.kernels.attention_launches:variants", CAPABILITIES, tmp_path / "variants.json")
    check_resources(compiled)
    for kernel in compiled:
        if not kernel.kernel.startswith("reduce") and "8bit" not in kernel.launch:
            # Two tiles of large heads do not fit the memory of Ada's programs.
            assert kernel.count(COPY_16) >= 12 or kernel.generation is GpuGeneration.ADA, str(kernel)
            assert kernel.matrix_instructions, str(kernel)
        if kernel.kernel == "chunk_attention_kernel" and "latent" in kernel.launch and "8bit" not in kernel.launch:
            assert kernel.matrix_instructions == instructions_of(kernel.capability), str(kernel)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_of_published_mixtures_and_hybrids_fit_the_gpu(tmp_path: Path) -> None:
    compiled = compile_launches("tests.kernels.published_launches", (90,), tmp_path / "published.json")
    for kernel in compiled:
        assert kernel.shared_bytes <= kernel.generation.max_shared_bytes, str(kernel)
        # Sorting is one program of some hundred pairs, whose stack of a few bytes is no traffic. The sums of latent
        # vectors fill a chunk's registers: six that its result needs are stored before its loops and loaded after them.
        most = {"sort_kernel": 16, "chunk_attention_kernel": 24 * kernel.launch.startswith("deepseek_lite")}
        is_kept = kernel.stack_bytes <= most.get(kernel.kernel, 0)
        assert is_kept or CHECKED in kernel.launch, f"{kernel} spills registers"
    launched = {kernel.kernel for kernel in compiled}
    assert {"split_attention_kernel", "chunk_attention_kernel", "dense_experts_kernel"} <= launched
    assert {"packed_experts_kernel", "sort_kernel", "combine_kernel"} <= launched


def test_elementwise_kernels_access_16_bytes(elementwise: list[CompiledKernel]) -> None:
    for kernel in elementwise:
        is_rounded = any(kind in kernel.launch for kind in ("int8", "fp8"))
        # Rotation also loads a position and a slot, rounding a scale that is given.
        num_words = 2 if kernel.kernel == "rope_kv_write_kernel" else int("static" in kernel.launch)
        assert kernel.count(LOAD) - kernel.count(LOAD_16) == num_words, str(kernel)
        # Rounding also stores a scale, and eight features of a thread are no more than eight bytes then.
        narrow = 2 if kernel.launch.startswith("silu_mul_fp8_blocks") else int(is_rounded)
        assert kernel.count(STORE) - kernel.count(STORE_16) == narrow, str(kernel)
        assert kernel.count(STORE_16) > 0 or narrow == 2, str(kernel)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_with_a_state_fit_the_gpu_without_spills(tmp_path: Path) -> None:
    compiled = compile_launches("tests.kernels.recurrent_launches", CAPABILITIES, tmp_path / "recurrent.json")
    # Chunks of the delta rule are two kernels: what solves their systems is found beforehand, for all at once.
    assert len(compiled) == 15 * len(CAPABILITIES)
    for kernel in compiled:
        # Two registers that a step keeps aside while it copies a state, since it reads its inputs in wide loads.
        kernel.check_fits(8 if kernel.launch == "ssd_steps_copied" else 0)
        # Features are read 16 bytes at once, gates and what a state remembers one by one.
        assert kernel.count(r"ld\.global\S*\.b16") <= 10, str(kernel)
    launched = [kernel.kernel for kernel in compiled if (kernel.launch, kernel.capability) == ("delta_chunks", 90)]
    assert launched == ["invert_chunks_kernel", "gated_delta_kernel"]
