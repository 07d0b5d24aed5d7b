from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.sizing.devices import DEVICES, find_device
from ops.sizing.model_size import CACHE_DTYPES, FORMATS, ModelSize, read_model_size
from ops.sizing.plan import Workload, steady
from ops.sizing.roofline import COMPUTE_SHARE, Roofline
from shared.errors import ConfigError
from tests.ops.sizing.models import LLAMA_2_70B, LLAMA_31_8B, LLAMA_33_70B, write_config


@pytest.fixture
def llama_33(tmp_path: Path) -> ModelSize:
    return read_model_size(write_config(tmp_path, LLAMA_33_70B))


def test_70b_in_16_bits_on_an_a100_generates_about_14_tokens_a_second(tmp_path: Path) -> None:
    """The worked example of many guides: 140 GB of weights through 2 TB/s."""
    size = read_model_size(write_config(tmp_path, LLAMA_2_70B))
    bound = Roofline(size, find_device("a100"), FORMATS["bf16"], torch.float16, 1, 1.0, 1.0, 1.0)
    assert 1 / bound.seconds(1, 1, []) == pytest.approx(14.5, rel=0.05)


def test_8b_on_an_h200_decodes_as_fast_as_vllm(tmp_path: Path) -> None:
    """4.1 to 4.5 ms at batch 1."""
    size = read_model_size(write_config(tmp_path, LLAMA_31_8B))
    roofline = Roofline(size, find_device("h200"), FORMATS["bf16"], torch.bfloat16)
    assert 4.1e-3 < roofline.seconds(1, 1024, []) < 4.5e-3


@pytest.mark.parametrize(
    ("device", "prompt", "output", "published"),
    [
        ("h200", 1000, 1000, 2587),
        ("h200", 1024, 8192, 2009),
        ("h200", 8192, 1024, 537),
        ("h200", 32768, 1024, 120),
        ("h100", 1000, 1000, 2209),
        ("h100", 8192, 1024, 398),
    ],
)
def test_throughput_is_that_of_tensorrt_llms_table_within_a_band(
    llama_33: ModelSize, device: str, prompt: int, output: int, published: int
) -> None:
    """Llama 3.3 70B in FP8 over two devices, output tokens a second and device (perf-overview.md, 2026)."""
    roofline = Roofline(llama_33, find_device(device), FORMATS["fp8"], CACHE_DTYPES["fp8"], 2)
    num_tokens = roofline.num_blocks(prompt + output, 8192, 2048, 0.9) * 16
    # Sequences of all ages: on average half of the answer is there.
    batch = min(2048, num_tokens // (prompt + output // 2))
    found = steady(roofline, batch, Workload(1.0, prompt, output), 8192)
    assert found is not None
    assert found.requests_per_s * output / 2 == pytest.approx(published, rel=0.25)


def test_step_takes_the_slower_of_reading_and_computing(llama_33: ModelSize) -> None:
    roofline = Roofline(llama_33, find_device("h200"), FORMATS["fp8"], CACHE_DTYPES["fp8"])
    decode, prompt = roofline.seconds(1, 100, []), roofline.seconds(0, 0, [(0, 8192)])
    # A few decodes beside it are free, and so is a short prompt beside decodes.
    assert roofline.seconds(2, 200, []) == pytest.approx(decode, rel=0.01)
    assert roofline.seconds(1, 100, [(0, 8192)]) == pytest.approx(prompt, rel=0.01)
    # Attention is computed in 16 bits, at half the rate of the matrices.
    matrices, pairs = 2 * 8192 * 68.5e9, 80 * 4 * 8192 * 8192**2 / 2
    assert prompt == pytest.approx((matrices / 1979e12 + pairs / 989.5e12) / COMPUTE_SHARE, rel=0.01)


def test_ranks_divide_a_step_and_pay_for_exchanging(llama_33: ModelSize) -> None:
    one, two = (
        Roofline(llama_33, find_device("h200"), FORMATS["fp8"], CACHE_DTYPES["fp8"], ranks).seconds(1, 1000, [])
        for ranks in (1, 2)
    )
    assert one / 2 < two < one
    # Two exchanges a layer of 10 µs and a few bytes.
    assert two - one / 2 == pytest.approx(160 * 10e-6, rel=0.02)


@pytest.mark.parametrize("ranks", [3, 5, 128])
def test_ranks_that_cannot_divide_the_heads_are_unsupported(llama_33: ModelSize, ranks: int) -> None:
    with pytest.raises(ConfigError, match="is unsupported"):
        Roofline(llama_33, find_device("h200"), FORMATS["fp8"], CACHE_DTYPES["fp8"], ranks)


def test_weights_that_do_not_fit_are_told(llama_33: ModelSize) -> None:
    roofline = Roofline(llama_33, find_device("a100"), FORMATS["bf16"], torch.bfloat16)
    with pytest.raises(ConfigError, match=r"141\.1 GB of weights each leave 0\.0 GB for keys and values"):
        roofline.num_blocks(4096, 8192, 256, 0.9)


def test_memory_beside_the_weights_holds_the_cache(llama_33: ModelSize) -> None:
    roofline = Roofline(llama_33, find_device("h200"), FORMATS["fp8"], CACHE_DTYPES["bf16"])
    num_blocks = roofline.num_blocks(8192, 8192, 256, 0.9)
    used = roofline.weight_bytes + roofline.activation_bytes(8192, 256) + num_blocks * 16 * 327_680
    assert used == pytest.approx(0.9 * 139.7 * 2**30, rel=0.001)


def test_70b_in_16_bits_on_two_h100_serves_tens_of_sequences(llama_33: ModelSize) -> None:
    """As people run it: a device of "80 GB" has 85 * 10**9 bytes, and nearly all of the rest is weights."""
    roofline = Roofline(llama_33, find_device("h100"), FORMATS["bf16"], torch.bfloat16, 2)
    assert 40 < roofline.num_blocks(700, 8192, 256, 0.9) * 16 // 704 < 52


def test_unknown_device_is_unsupported_and_known_ones_name_their_source() -> None:
    with pytest.raises(ConfigError, match=r"'v100' is unsupported; known are a100, h100"):
        find_device("v100")
    # The same variable says where a worker runs.
    for name in ("cuda", "cuda:1", "cpu", "auto"):
        with pytest.raises(ConfigError, match="is where a worker runs"):
            find_device(name)
    assert find_device("RTX 4090") is DEVICES["rtx4090"]
    assert find_device("H100-SXM") is DEVICES["h100"]
    for device in DEVICES.values():
        assert "data sheet" in device.source or "white paper" in device.source
        assert device.flops_8bit is None or device.flops_8bit == pytest.approx(2 * device.flops, rel=0.02)
