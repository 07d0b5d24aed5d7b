from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.sampling.sampler import Sampler
from kernels.sampling import triton_kernel
from kernels.sampling.config import SamplingConfig
from kernels.sampling.parameters import INVALID_TOKEN, PenaltyTable, SamplingParameters
from kernels.sampling.reference import sample_tokens_reference, uniforms_reference
from kernels.sampling.triton_kernel import sample_tokens_triton
from shared.messages import Sampling
from tests.kernels.compile_checks import compile_launches

# So small that a few hundred tokens fill many tiles, several readings, and more than one list.
CONFIG = SamplingConfig(
    tile=32,
    tiles=2,
    threshold_rows=2,
    threshold_tiles=4,
    pivots=4,
    stages=1,
    capacity=64,
    statistics_warps=4,
    threshold_warps=4,
    draw_warps=4,
)
VOCAB_SIZE = 601
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(seed=1),
    Sampling(seed=-2, temperature=0.3),
    Sampling(seed=2**63 - 1, min_p=0.2),
    Sampling(seed=4, top_k=3),
    Sampling(seed=5, top_k=300),
    Sampling(seed=6, top_p=0.9),
    Sampling(seed=7, top_p=0.0),
    Sampling(seed=8, top_k=5, top_p=0.8, temperature=1.7),
    Sampling(seed=9, top_k=400, top_p=0.95, min_p=0.01),
    Sampling(seed=10, min_p=0.001, top_p=0.7),
    Sampling(seed=11, top_k=5000),
]


def make_parameters(samplings: list[Sampling], positions: list[int], slots: torch.Tensor) -> SamplingParameters:
    """Put row i into `slots[i]`, and NaN or nonsense into the slots that no row names."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        table = torch.full((int(slots.max()) + 3,), float("nan") if dtype.is_floating_point else -77, dtype=dtype)
        table[slots] = torch.tensor(values, dtype=dtype)
        return table

    return SamplingParameters(
        column([0.0 if s.temperature == 0 else 1.0 / s.temperature for s in samplings], torch.float32),
        column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], torch.float32),
        column([s.top_k for s in samplings], torch.int32),
        column([s.top_p for s in samplings], torch.float32),
        column([s.seed for s in samplings], torch.int64),
        column(positions, torch.int64),
    )


def make_logits(rows: int, kind: str, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        return logits * 4
    # As a bf16 head makes them: most tokens tie with others.
    return logits.bfloat16().float() if kind == "tied" else logits


def poisoned(*size: object, dtype: torch.dtype = torch.float32, **options: object) -> torch.Tensor:
    shape = size[0] if isinstance(size[0], tuple) else size
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0x7FFFFFFF, dtype=dtype, **options)  # type: ignore[call-overload]


def run_kernels(
    logits: torch.Tensor,
    slots: torch.Tensor,
    parameters: SamplingParameters,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    penalties: PenaltyTable | None = None,
    may_truncate: bool = True,
) -> list[int]:
    """Run the kernels on memory that holds NaN wherever they have not written."""
    moved = SamplingParameters(*(getattr(parameters, name).to(device) for name in SamplingParameters.__slots__))
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernel.torch, "empty", poisoned)
        drawn = sample_tokens_triton(logits.to(device), slots.to(device), moved, penalties, may_truncate, CONFIG)
    return drawn.tolist()


@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_tokens_equal_reference(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = torch.randperm(len(SAMPLINGS) + 4, generator=torch.Generator().manual_seed(3))[: len(SAMPLINGS)]
    parameters = make_parameters(SAMPLINGS, list(range(2**33, 2**33 + len(SAMPLINGS))), slots)
    padded = torch.full((len(SAMPLINGS), VOCAB_SIZE + 3), float("nan"))
    logits = padded[:, :VOCAB_SIZE].copy_(make_logits(len(SAMPLINGS), kind))
    expected = sample_tokens_reference(logits, slots, parameters).tolist()
    assert run_kernels(logits, slots, parameters, monkeypatch, device) == expected


def test_tokens_equal_the_cpu_sampler(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = [row * 7 for row in range(len(SAMPLINGS))]
    sequences = [
        Sequence(str(row), [1] * (2 + position), 2, sampling, max_tokens=10_000)
        for row, (sampling, position) in enumerate(zip(SAMPLINGS, positions, strict=True))
    ]
    logits = make_logits(len(SAMPLINGS), "peaked", seed=1)
    sampled = Sampler(torch.device("cpu")).sample(logits.clone(), sequences)
    slots = torch.arange(len(SAMPLINGS))
    drawn = run_kernels(logits, slots, make_parameters(SAMPLINGS, positions, slots), monkeypatch, device)
    assert drawn == [tokens.token_ids[0] for tokens in sampled]


def test_batch_without_truncation_equals_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [Sampling(seed=seed, temperature=seed % 3 / 2) for seed in range(9)]
    slots = torch.arange(9).flip(0)
    parameters = make_parameters(samplings, [0] * 9, slots)
    logits = make_logits(9, "flat")
    expected = sample_tokens_reference(logits, slots, parameters).tolist()
    assert run_kernels(logits, slots, parameters, monkeypatch, device, may_truncate=False) == expected
    assert expected[0] == int(logits[0].argmax())


def test_penalties_equal_reference_and_count_what_is_drawn(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, words = 4, -(-VOCAB_SIZE // 32)
    slots = torch.tensor([5, 0, 2, 3])
    penalties = PenaltyTable(
        torch.tensor([1.7, 0, 1.0, 0.6, 0, 1.0]),
        torch.tensor([0.3, 0, 0.0, -0.7, 0, 0.4]),
        torch.tensor([-0.2, 0, 0.0, 1.1, 0, 0.0]),
        torch.randint(0, 4, (6, VOCAB_SIZE), generator=generator, dtype=torch.int32) // 2,
        torch.randint(-(2**31), 2**31, (6, words), generator=generator).int(),
    )
    parameters = make_parameters([Sampling(seed=row, temperature=0.2 * row) for row in range(rows)], [3] * rows, slots)
    logits = make_logits(rows, "flat")
    ours, theirs = logits.to(device, copy=True), logits.clone()
    moved = PenaltyTable(*(getattr(penalties, name).to(device, copy=True) for name in PenaltyTable.__slots__))
    drawn = run_kernels(ours, slots, parameters, monkeypatch, device, moved)
    assert drawn == sample_tokens_reference(theirs, slots, parameters, penalties).tolist()
    assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(moved.output_counts.cpu(), penalties.output_counts)
    assert not torch.equal(theirs, logits)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_that_are_no_distribution_give_no_token(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(6, "flat")
    logits[0, 500] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    logits[3, :400] = float("-inf")
    logits[4, 1:] = float("-inf")
    samplings = [Sampling(top_p=0.9)] * 4 + [Sampling(top_k=3, top_p=0.5), Sampling(temperature=0.0)]
    slots = torch.arange(6)
    parameters = make_parameters(samplings, [0] * 6, slots)
    drawn = run_kernels(logits, slots, parameters, monkeypatch, device)
    assert drawn == sample_tokens_reference(logits, slots, parameters).tolist()
    assert drawn[:3] == [INVALID_TOKEN] * 3
    assert drawn[3] >= 400
    assert drawn[4] == 0


def test_ties_that_no_list_holds_stand_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, ::2] = 1.0
    samplings = [Sampling(top_k=2, seed=12), Sampling(top_p=0.01, seed=13)]
    slots = torch.arange(2)
    parameters = make_parameters(samplings, [0, 0], slots)
    drawn = run_kernels(logits, slots, parameters, monkeypatch, device)
    uniform = uniforms_reference(parameters.seed[slots], parameters.position[slots]).tolist()
    assert drawn == [int(uniform[0] * VOCAB_SIZE), int(uniform[1] * 301) * 2]


def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    compiled = compile_launches("tests.kernels.sampling_launches", (80, 90), tmp_path / "compiled")
    assert {kernel.kernel for kernel in compiled} == {
        "penalties_kernel",
        "tile_statistics_kernel",
        "threshold_kernel",
        "tile_masses_kernel",
        "draw_kernel",
    }
    for kernel in compiled:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= kernel.generation.max_shared_bytes, kernel
        if kernel.kernel in ("tile_statistics_kernel", "tile_masses_kernel"):
            assert kernel.count(r"ld\.global[^;]*\.v4") > 0, kernel
        if kernel.kernel == "threshold_kernel":
            assert kernel.count(r"cp\.async\.c[ga]\.shared\.global[^;]*, 0x10,") > 0, kernel
