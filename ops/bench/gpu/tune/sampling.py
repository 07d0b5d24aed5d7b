"""The entry of the table of sampling: launches that differ from the present one of Hopper in one respect or two."""

from __future__ import annotations

from functools import partial

import torch

from kernels.sampling import SamplingParameters, launch_table, sample_tokens
from kernels.sampling.config import SamplingConfig
from kernels.sampling.reference import sample_tokens_reference
from ops.bench.gpu.case import Check, sets_for, wrong_share
from ops.bench.gpu.cases.logits import make_parameters
from ops.bench.gpu.tune.choice import Entry, Problem, Tuning

_VOCAB_SIZE = 128_256
# Deviation of the logits, top_k, top_p.
_KINDS = {"plain": (1.0, 0, 1.0), "top-k top-p": (1.0, 50, 0.9), "top-p": (4.0, 0, 0.9), "flat top-p": (1.0, 0, 0.9)}
# None of them spills registers on Hopper.
_VARIATIONS: tuple[Entry, ...] = (
    {"tile": 128}, {"tile": 512, "threshold_rows": 2},
    {"tiles": 8}, {"tiles": 32}, {"tiles": 32, "statistics_warps": 8}, {"statistics_warps": 8},
    {"threshold_rows": 2}, {"threshold_rows": 2, "stages": 2}, {"threshold_rows": 2, "stages": 6},
    {"stages": 2}, {"stages": 3},
    {"pivots": 2}, {"pivots": 8, "threshold_rows": 2}, {"draw_warps": 2}, {"draw_warps": 8},
)  # fmt: skip


def draw(logits: torch.Tensor, parameters: SamplingParameters, may_truncate: bool, entry: Entry) -> torch.Tensor:
    """Launch the kernels by an entry; where there is no GPU, run the dispatched op."""
    slots = torch.arange(len(logits), device=logits.device)
    if logits.device.type != "cuda":
        return sample_tokens(logits, slots, slots, parameters, may_truncate=may_truncate)
    from kernels.sampling.triton_kernel import sample_tokens_triton

    return sample_tokens_triton(logits, slots, slots, parameters, may_truncate, SamplingConfig(**entry))


def make_checks(device: torch.device, entry: Entry, num_rows: int, vocab_size: int) -> list[Check]:
    """Compare an entry's tokens with those of a full sort in float64."""

    def error(deviation: float, top_k: int, top_p: float) -> float:
        logits = torch.randn(num_rows, vocab_size, device=device) * deviation
        parameters = make_parameters(device, num_rows, top_k, top_p)
        slots = torch.arange(num_rows, device=device)
        expected = sample_tokens_reference(logits, slots, slots, parameters)
        return wrong_share(draw(logits, parameters, _truncates(top_k, top_p), entry), expected)

    # Where a token weighs a millionth of the sum, a rounding of the sum moves a draw to the next one.
    return [Check(name, partial(error, *kind), 0.05) for name, kind in _KINDS.items()]


def make_problems(device: torch.device, num_rows: int, vocab_size: int) -> list[Problem]:
    """Make the logits of each kind."""

    def problem(name: str, deviation: float, top_k: int, top_p: float) -> Problem:
        num_sets = sets_for(num_rows * vocab_size * 4)
        logits = torch.randn(num_sets, num_rows, vocab_size, device=device) * deviation
        parameters, truncates = make_parameters(device, num_rows, top_k, top_p), _truncates(top_k, top_p)
        return Problem(
            f"{num_rows}x{vocab_size} {name}",
            num_sets,
            lambda entry: lambda index: draw(logits[index], parameters, truncates, entry),
        )

    return [problem(name, *kind) for name, kind in _KINDS.items()]


def _truncates(top_k: int, top_p: float) -> bool:
    return top_k > 0 or top_p < 1


SAMPLING = (
    Tuning(
        "SAMPLING",
        None,
        tuple({**launch_table.SAMPLING["HOPPER"], **variation} for variation in _VARIATIONS),
        partial(make_checks, num_rows=96, vocab_size=_VOCAB_SIZE),
        lambda device: [
            *make_problems(device, num_rows=128, vocab_size=_VOCAB_SIZE),
            *make_problems(device, num_rows=8, vocab_size=_VOCAB_SIZE),
        ],
    ),
)
