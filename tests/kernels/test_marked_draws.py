"""Draws of watermarked rows: the same of every implementation, as often as the softmax says, and no other row's."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.sampling.dispatch import sample_tokens_cpu
from kernels.sampling.reference import philox, sample_tokens_reference, token_uniforms
from shared.sampling import Sampling
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.sampling_cases import SAMPLINGS, SamplingCase, make_case, make_logits
from tests.kernels.test_sampling import CONFIG, library

MARKS = torch.randint(-(2**63), 2**63 - 1, (len(SAMPLINGS),), generator=torch.Generator().manual_seed(5))


def drawn_by(
    name: str, case: SamplingCase, marks: torch.Tensor | None, device: torch.device, *, may_truncate: bool = True
) -> list[int]:
    """Draw on memory that holds NaN wherever nothing has been written."""
    where = torch.device("cpu") if name == "cpu" else device
    moved = case.to(where)
    given = (moved.logits, moved.slots, moved.positions, moved.parameters)
    marks = None if marks is None else marks.to(where)
    if name == "cpu":
        sample = partial(sample_tokens_cpu, library())
    else:
        kernel = pytest.importorskip("kernels.sampling.triton_kernel")
        sample = partial(kernel.sample_tokens_triton, config=CONFIG)
    with poisoned_memory():
        drawn: list[int] = sample(*given, may_truncate=may_truncate, marks=marks).tolist()
    return drawn


def expected_of(case: SamplingCase, marks: torch.Tensor | None) -> list[int]:
    given = (case.logits, case.slots, case.positions, case.parameters)
    return sample_tokens_reference(*given, marks=marks).tolist()


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
@pytest.mark.parametrize(("kind", "vocab_size"), [("flat", 1), ("peaked", 7), ("tied", 33), ("masked", 601)])
def test_marked_tokens_equal_reference(implementation: str, kind: str, vocab_size: int, device: torch.device) -> None:
    case = make_case(SAMPLINGS, make_logits(len(SAMPLINGS), vocab_size, kind))
    marks = MARKS.clone()
    marks[1::5] = 0
    assert drawn_by(implementation, case, marks, device) == expected_of(case, marks)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_marked_tokens_without_truncation_equal_reference(implementation: str, device: torch.device) -> None:
    case = make_case([Sampling(seed=row, temperature=0.5 + row / 8) for row in range(18)], make_logits(18, 601, "flat"))
    assert drawn_by(implementation, case, MARKS, device, may_truncate=False) == expected_of(case, MARKS)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_unmarked_greedy_and_invalid_rows_draw_as_without_marks(implementation: str, device: torch.device) -> None:
    case = make_case(SAMPLINGS, make_logits(len(SAMPLINGS), 601, "peaked"))
    case.logits[3, 5] = torch.nan
    marks = MARKS.clone()
    marks[4:] = 0
    with_marks, without = (drawn_by(implementation, case, given, device) for given in (marks, None))
    assert with_marks[0] == without[0], "greedy"
    assert with_marks[3] == without[3] == -1
    assert with_marks[4:] == without[4:]
    assert with_marks[1:3] != without[1:3]


def test_marked_draws_of_a_large_vocabulary_equal_reference() -> None:
    samplings = [Sampling(seed=row, temperature=0.4 + row / 5) for row in range(8)]
    case = make_case(samplings, make_logits(8, 50_003, "peaked"))
    device = torch.device("cpu")
    assert drawn_by("cpu", case, MARKS[:8], device, may_truncate=False) == expected_of(case, MARKS[:8])


@pytest.mark.parametrize(
    ("sampling", "kept"), [(Sampling(), 12), (Sampling(temperature=0.7, top_k=5), 5), (Sampling(top_p=0.8), None)]
)
def test_over_many_marks_tokens_come_as_often_as_the_softmax_says(sampling: Sampling, kept: int | None) -> None:
    num_draws, vocab_size = 40_000, 12
    logits = make_logits(1, vocab_size, "flat")
    case = make_case([sampling], logits)
    given = (logits.expand(num_draws, -1).contiguous(), case.slots.expand(num_draws), case.positions.expand(num_draws))
    marks = torch.randint(-(2**63), 2**63 - 1, (num_draws,), generator=torch.Generator().manual_seed(11))
    drawn = sample_tokens_cpu(library(), *given, case.parameters, True, marks)
    counts = drawn.bincount(minlength=vocab_size).double()
    weights = torch.softmax(logits[0].double() / sampling.temperature, 0)
    ordered = weights.sort(descending=True).values
    if kept is None:
        kept = int((ordered.cumsum(0) < sampling.top_p).sum()) + 1
    weights[weights < ordered[kept - 1]] = 0.0
    expected = weights / weights.sum() * num_draws
    is_kept = expected > 0
    assert counts[~is_kept].sum() == 0
    statistic = ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum()
    # The chi-square of p = 0.0001.
    assert statistic < {4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9, 8: 31.8, 11: 37.4}[int(is_kept.sum()) - 1]


def test_uniforms_of_tokens_are_the_published_generators_words() -> None:
    # Random123's known answer for a counter and a key of zeros.
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    zero = torch.zeros(4, dtype=torch.int64)
    assert [int(word) for word in (each[0] for each in philox(zero, zero))] == words
    assert token_uniforms(zero, torch.arange(4)).tolist() == [(word + 0.5) * 2.0**-32 for word in words]
