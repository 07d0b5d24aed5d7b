from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.dense.small_gemm import triton_kernel
from kernels.linear.dense.small_gemm.config import (
    MAX_OUT_FEATURES,
    SmallGemmWorkspace,
    small_gemm_launch,
    small_gemm_splits,
)
from kernels.linear.dense.small_gemm.triton_kernel import small_gemm_triton
from kernels.linear.product_launch import MAX_SPLITS, ProductLaunch
from tests.kernels.compile_checks import CAPABILITIES, compile_launches, instructions_of

H200 = Gpu(GpuGeneration.HOPPER, 132)
SMALL = ProductLaunch(block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


def run_kernel(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    workspace: SmallGemmWorkspace,
    num_splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> torch.Tensor:
    """Run the kernel on memory that holds NaN wherever it has not written."""
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernel.torch, "empty", lambda *size, **kw: torch.full(*size, float("nan"), **kw))
        return small_gemm_triton(inputs, weight, workspace, H200, SMALL, num_splits)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize(("num_rows", "out_features", "in_features"), [(1, 64, 320), (3, 131, 203), (16, 70, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_product_equals_reference(
    dtype: torch.dtype,
    num_rows: int,
    out_features: int,
    in_features: int,
    num_splits: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(in_features)
    # Inputs and weight are parts of larger memory, which holds NaN around them.
    padded = torch.full((num_rows + 1, in_features + 5), float("nan"), dtype=dtype)
    inputs = padded[:num_rows, :in_features].copy_(torch.randn(num_rows, in_features, generator=generator))
    padded_weight = torch.full((out_features + 1, in_features + 3), float("nan"), dtype=dtype)
    weight = padded_weight[:out_features, :in_features].copy_(
        torch.randn(out_features, in_features, generator=generator)
    )
    workspace = SmallGemmWorkspace(device, num_rows, out_features)
    workspace.partials.fill_(float("nan"))
    expected = (inputs.float() @ weight.float().T).to(inputs.dtype)
    for _ in range(2):  # the second launch finds the counters as the first left them
        actual = run_kernel(inputs.to(device), weight.to(device), workspace, num_splits, monkeypatch).cpu()
        assert not actual.isnan().any()
        assert (actual - expected).norm() / expected.norm() < TOLERANCE[dtype]
    assert workspace.counters.count_nonzero() == 0


def test_row_does_not_depend_on_the_others(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(rows, 160, generator=generator).to(device) for rows in (7, 64))
    workspace = SmallGemmWorkspace(device, 7, 64)
    together = run_kernel(inputs, weight, workspace, 3, monkeypatch)
    alone = run_kernel(inputs[4:5], weight, workspace, 3, monkeypatch)
    assert torch.equal(together[4:5], alone)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64])
@pytest.mark.parametrize("out_features", [1024, 4096, 6144, 28_672, 151_936])
@pytest.mark.parametrize("in_features", [1024, 4096, 14_336])
def test_splits_fit_the_workspace_and_fill_the_gpu(num_rows: int, out_features: int, in_features: int) -> None:
    launch = small_gemm_launch(GpuGeneration.HOPPER, num_rows)
    splits = small_gemm_splits(launch, H200, out_features, in_features)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or out_features <= MAX_OUT_FEATURES
    assert splits * launch.block_k <= in_features
    programs = splits * -(-out_features // launch.block_n)
    at_once = 2 * H200.num_multiprocessors
    assert programs > 0.45 * at_once
    if num_rows == 1:
        assert programs / (-(-programs // at_once) * at_once) > (0.45 if out_features == 1024 else 0.84)


def test_sums_of_a_row_do_not_depend_on_how_many_come_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3 8B's widest matrix: what a split costs for each row alone would choose others for 1 and for 16."""
    launched: list[dict[str, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Kernel:
            return self

        def __call__(self, *tensors: object, **constants: int) -> None:
            launched.append(constants)

    monkeypatch.setattr(triton_kernel, "small_gemm_kernel", Kernel())
    weight = torch.empty(4096).as_strided((28_672, 4096), (0, 1))
    for num_rows in (1, 7, 16):
        small_gemm_triton(torch.empty(num_rows, 4096), weight, SmallGemmWorkspace(torch.device("cpu"), 1, 64), H200)

    assert launched[0]["SPLITS"] > 1
    assert launched == launched[:1] * 3


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_kernel_compiles_to_tensor_core_instructions(tmp_path: Path) -> None:
    for kernel in compile_launches("tests.kernels.small_gemm_launches", CAPABILITIES, tmp_path / "compiled"):
        kernel.check_fits()
        assert 2 * kernel.shared_bytes <= kernel.generation.max_shared_bytes, kernel
        assert kernel.matrix_instructions == instructions_of(kernel.capability), kernel
        if not kernel.launch.startswith("odd"):
            assert kernel.count(r"cp\.async\.cg\.shared\.global[^;]*, 0x10,") > 0, kernel
        if kernel.launch.startswith("output"):
            assert kernel.count(r"atom\.global\.gpu\.acq_rel\.add") == 1, kernel
