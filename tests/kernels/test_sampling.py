"""Every implementation of sampling against the reference: the same tokens, bit for bit the same penalties."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.sampling import dispatch
from kernels.sampling.config import SamplingConfig
from kernels.sampling.dispatch import apply_penalties_cpu, count_tokens_cpu, sample_tokens_cpu, score_tokens_cpu
from kernels.sampling.parameters import INVALID_TOKEN
from kernels.sampling.reference import (
    apply_penalties_reference,
    count_tokens_reference,
    sample_tokens_reference,
    score_tokens_reference,
    uniforms,
)
from shared.sampling import Sampling
from tests.kernels.compile_checks import compile_launches
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.sampling_cases import SAMPLINGS, SamplingCase, copied, make_case, make_logits, make_penalties

CPU = torch.device("cpu")
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
Draw = Callable[[SamplingCase, bool], list[int]]


class TritonOp:
    """The Triton kernels, with launches of `CONFIG`."""

    def __init__(self) -> None:
        kernel = pytest.importorskip("kernels.sampling.triton_kernel")
        self.penalise, self.count = kernel.apply_penalties_triton, kernel.count_tokens_triton
        self.sample = partial(kernel.sample_tokens_triton, config=CONFIG)


class CpuOp:
    """The compiled kernels."""

    def __init__(self) -> None:
        self.penalise, self.count = partial(apply_penalties_cpu, library()), partial(count_tokens_cpu, library())
        self.sample = partial(sample_tokens_cpu, library())


class ReferenceOp:
    """The oracle."""

    penalise, count = staticmethod(apply_penalties_reference), staticmethod(count_tokens_reference)
    sample = staticmethod(sample_tokens_reference)


Op = TritonOp | CpuOp | ReferenceOp


def run(op: Op, case: SamplingCase, may_truncate: bool = True) -> list[int]:
    """Draw as the sampler does; without drafts, drawn tokens are counted."""
    if case.penalties is not None:
        op.penalise(case.logits, case.slots, case.penalties, case.drafts)
    drawn = op.sample(case.logits, case.slots, case.positions, case.parameters, may_truncate=may_truncate)
    if case.penalties is not None and case.drafts is None:
        op.count(case.penalties, case.slots, drawn)
    return drawn.tolist()


def library() -> CpuLibrary:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    return library


@pytest.fixture(params=["cpu", "triton"])
def draw(request: pytest.FixtureRequest, device: torch.device) -> Draw:
    """Draw tokens on memory that holds NaN wherever nothing has been written."""
    op = CpuOp() if request.param == "cpu" else TritonOp()
    where = CPU if request.param == "cpu" else device

    def draw_moved(case: SamplingCase, may_truncate: bool = True) -> list[int]:
        moved = case.to(where)
        with poisoned_memory():
            drawn = run(op, moved, may_truncate)
        # Written values must arrive in the caller's case.
        case.logits = moved.logits.cpu()
        if moved.penalties is not None:
            case.penalties = copied(moved.penalties, CPU)
        return drawn

    return draw_moved


def reference(case: SamplingCase) -> list[int]:
    return run(ReferenceOp(), case)


KINDS, VOCAB_SIZES = ("flat", "peaked", "tied", "masked"), (1, 7, 33, 256, 601)
# Each kind with less than a tile of tokens, with a few tiles, and with more; the interpreter takes a second for each.
DEFAULT_CASES = {
    *[("flat", 1), ("peaked", 7), ("masked", 7), ("flat", 33), ("tied", 33)],
    *[("peaked", 256), ("masked", 601)],
}


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [
        pytest.param(*case, marks=[] if case in DEFAULT_CASES else pytest.mark.slow)
        for case in itertools.product(KINDS, VOCAB_SIZES)
    ],
)
def test_tokens_equal_reference(draw: Draw, kind: str, vocab_size: int) -> None:
    case = make_case(SAMPLINGS, make_logits(len(SAMPLINGS), vocab_size, kind))
    assert draw(case, True) == reference(case)


def test_batch_without_truncation_equals_reference(draw: Draw) -> None:
    samplings = [Sampling(seed=seed, temperature=seed % 3 / 2) for seed in range(9)]
    case = make_case(samplings, make_logits(9, 601, "flat"))
    expected = reference(case)
    assert draw(case, False) == expected
    assert expected[0] == int(case.logits[0].argmax())


@pytest.mark.parametrize("vocab_size", [5, 64, 601])
@pytest.mark.parametrize("with_drafts", [False, True])
def test_penalties_equal_reference_and_count_what_is_drawn(draw: Draw, vocab_size: int, with_drafts: bool) -> None:
    samplings = [Sampling(seed=row, temperature=0.2 * row, top_k=row % 3) for row in range(7)]
    case = make_case(samplings, make_logits(7, vocab_size, "flat"))
    penalties = make_penalties(case.slots, vocab_size)
    case.penalties = copied(penalties, CPU)
    if with_drafts:
        case.slots = case.slots[torch.tensor([0, 0, 0, 3, 3, 5, 6])]
        case.drafts = torch.randint(vocab_size, (7, 4), generator=torch.Generator().manual_seed(1))
        case.drafts[0] = -1
        case.drafts[1, 1:] = -1
        case.drafts[3] = case.drafts[3, 0]
    expected = case.to(CPU)
    tokens = reference(expected)
    before = case.logits
    assert draw(case, True) == tokens
    assert torch.equal(case.logits, expected.logits)
    assert not torch.equal(case.logits, before)
    assert case.penalties is not None
    assert expected.penalties is not None
    assert torch.equal(case.penalties.output_counts, expected.penalties.output_counts)
    assert torch.equal(case.penalties.seen_bits, expected.penalties.seen_bits)
    num_counted = int((case.penalties.output_counts - penalties.output_counts).sum())
    assert num_counted == (0 if with_drafts else len(tokens))


def test_without_compiled_kernels_the_reference_draws_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "cpu_library", lambda: None)
    case = make_case(SAMPLINGS, make_logits(len(SAMPLINGS), 96, "peaked"))
    case.penalties = make_penalties(case.slots, 96)
    expected = case.to(CPU)
    tokens = run(ReferenceOp(), expected)
    dispatch.apply_penalties(case.logits, case.slots, case.penalties, None)
    drawn = dispatch.sample_tokens(case.logits, case.slots, case.positions, case.parameters)
    dispatch.count_tokens(case.penalties, case.slots, drawn)
    assert drawn.tolist() == tokens
    assert torch.equal(case.logits, expected.logits)
    assert expected.penalties is not None
    assert torch.equal(case.penalties.output_counts, expected.penalties.output_counts)
    assert torch.equal(case.penalties.seen_bits, expected.penalties.seen_bits)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_counted_tokens_equal_reference(implementation: str, device: torch.device) -> None:
    op, where = (CpuOp(), CPU) if implementation == "cpu" else (TritonOp(), device)
    slots = torch.tensor([4, 0, 4, 4, 1, 4, 0])
    token_ids = torch.tensor([31, 32, 31, 63, -1, 0, 95])
    expected = make_penalties(slots, 96)
    expected.seen_bits[4] = 0
    expected.output_counts[4] = 0
    actual = copied(expected, where)
    before = expected.output_counts.clone()
    count_tokens_reference(expected, slots, token_ids)
    op.count(actual, slots.to(where), token_ids.to(where))
    op.count(actual, slots[:0].to(where), token_ids[:0].to(where))
    assert torch.equal(actual.output_counts.cpu(), expected.output_counts)
    assert torch.equal(actual.seen_bits.cpu(), expected.seen_bits)
    assert (expected.output_counts - before).sum().item() == 6
    assert expected.seen_bits[4].tolist() == [1 - 2**31, -(2**31), 0]


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN):RuntimeWarning")
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9), Sampling(top_k=3, top_p=0.5), Sampling(min_p=0.1)],
    ids=str,
)
@pytest.mark.parametrize("may_truncate", [False, True])
def test_logits_that_are_no_distribution_give_no_token(draw: Draw, sampling: Sampling, may_truncate: bool) -> None:
    logits = make_logits(9, 601, "flat")
    logits[0, 500] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    logits[3, :400] = float("-inf")
    logits[4, 1:] = float("-inf")
    logits[5] = float("nan")
    logits[6, 600] = float("nan")
    logits[7, 600] = -float("inf")
    case = make_case([sampling] * 9, logits)
    penalties = make_penalties(case.slots, 601)
    case.penalties = copied(penalties, CPU)
    expected = case.to(CPU)
    drawn = draw(case, may_truncate)
    if may_truncate:
        assert drawn == reference(expected)
    assert [token == INVALID_TOKEN for token in drawn] == [True, True, True, False, False, True, True, False, False]
    assert drawn[3] >= 400
    assert drawn[4] == 0
    assert case.penalties is not None
    assert (case.penalties.output_counts - penalties.output_counts).sum().item() == 4


def test_ties_that_no_list_holds_stand_together(draw: Draw) -> None:
    logits = torch.zeros(2, 601)
    logits[1, ::2] = 1.0
    case = make_case([Sampling(top_k=2, seed=12), Sampling(top_p=0.01, seed=13)], logits, first_position=0)
    drawn = draw(case, True)
    uniform = uniforms(torch.tensor([12, 13]), case.positions).tolist()
    assert drawn == [int(uniform[0] * 601), int(uniform[1] * 301) * 2]


@pytest.mark.parametrize("kind", ["flat", "peaked", "masked"])
@pytest.mark.parametrize(
    ("vocab_size", "num_top"), [(1, 0), (1, 20), (33, 5), (33, 33), (601, 3), (5000, 20), (9000, 1)]
)
def test_scores_equal_reference(kind: str, vocab_size: int, num_top: int) -> None:
    wide = make_logits(5, vocab_size + 3, kind)
    logits = wide[:, :vocab_size]
    token_ids = torch.randint(vocab_size, (5,), generator=torch.Generator().manual_seed(2))
    expected = score_tokens_reference(logits, token_ids, num_top)
    with poisoned_memory():
        scores = score_tokens_cpu(library(), logits, token_ids, num_top)
    torch.testing.assert_close(scores.chosen, expected.chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.top_values, expected.top_values, rtol=1e-5, atol=1e-5)
    values = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(values.gather(1, scores.top_ids), scores.top_values, rtol=1e-5, atol=1e-5)
    assert all(len(set(ids)) == scores.top_ids.shape[1] for ids in scores.top_ids.tolist())


def test_equal_scores_come_in_order_of_ids() -> None:
    assert score_tokens_cpu(library(), torch.zeros(1, 700), torch.tensor([5]), 4).top_ids.tolist() == [[0, 1, 2, 3]]


def test_scores_of_invalid_logits_are_nan() -> None:
    logits = make_logits(4, 300, "flat")
    logits[0, 299] = float("nan")
    logits[1] = float("-inf")
    logits[2, 0] = float("inf")
    scores = score_tokens_cpu(library(), logits, torch.zeros(4, dtype=torch.int64), 2)
    assert scores.chosen.isnan().tolist() == [True, True, True, False]
    assert scores.top_values.isnan().all(dim=1).tolist() == [True, True, True, False]
    assert bool(((scores.top_ids >= 0) & (scores.top_ids < 300)).all())


def test_uniform_numbers_are_those_of_the_published_generator() -> None:
    # Random123's known answer for a counter and a key of zeros begins with these two words.
    high, low = 0x6627E8D5, 0xE169C58D
    zero = torch.zeros(1, dtype=torch.int64)
    assert uniforms(zero, zero).item() == ((high >> 5) << 26 | low >> 6) * 2.0**-53


def test_all_64_bits_of_seed_and_position_matter() -> None:
    seeds = torch.tensor([1, 1 + 2**32, 1 - 2**63, 1, 1])
    positions = torch.tensor([0, 0, 0, 2**32, 1])
    assert len(set(uniforms(seeds, positions).tolist())) == 5


def test_uniform_numbers_are_uniform_and_seeds_and_positions_independent() -> None:
    seeds = torch.arange(-10, 10).repeat_interleave(1000)
    numbers = uniforms(seeds, torch.arange(1000).repeat(20)).reshape(20, 1000)
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = numbers.histc(50, 0, 1)
    # Chi-square, 49 degrees of freedom, p = 0.001.
    assert ((counts - 400) ** 2 / 400).sum() < 86
    assert numbers.corrcoef().triu(1).abs().max() < 0.15
    assert len(numbers.unique()) == numbers.numel()


pytest.importorskip("triton", reason="Triton does not support this platform")


@pytest.mark.compiles
def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    compiled = compile_launches("tests.kernels.elementwise_launches:sampling", (80, 90), tmp_path / "compiled")
    assert {kernel.kernel for kernel in compiled} == {
        "penalties_kernel",
        "count_tokens_kernel",
        "tile_statistics_kernel",
        "threshold_kernel",
        "tile_masses_kernel",
        "draw_kernel",
        "marked_draw_kernel",
    }
    for kernel in compiled:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= kernel.generation.max_shared_bytes, kernel
        if kernel.kernel in ("tile_statistics_kernel", "tile_masses_kernel"):
            assert kernel.count(r"ld\.global[^;]*\.v4") > 0, kernel
        if kernel.kernel == "threshold_kernel":
            assert kernel.count(r"cp\.async\.c[ga]\.shared\.global[^;]*, 0x10,") > 0, kernel
