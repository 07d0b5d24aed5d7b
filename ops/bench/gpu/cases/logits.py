"""Sampling and the bitmask. The floor of sampling is one read of the logits."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import torch

from kernels.logits_bitmask import forbid_tokens
from kernels.logits_bitmask.dispatch import forbid_tokens_reference
from kernels.sampling import SamplingParameters, sample_tokens
from kernels.sampling.config import SamplingConfig
from kernels.sampling.reference import sample_tokens_reference
from ops.bench.gpu.case import OURS, Candidate, Case, Entry, Op, OpSuite, Shapes, compiled, rotated, sizes, wrong_share
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_06B

# Standard deviations of random logits. At 1 half the vocabulary is in the nucleus; at 4 some tens, as in a model.
_FLAT, _PEAKED = 1.0, 4.0


def make_parameters(
    device: torch.device, num_rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingParameters:
    """Return the same parameters for all rows, each with a seed of its own."""
    column = torch.ones(num_rows, device=device)
    return SamplingParameters(
        column,
        column * (math.log(min_p) if min_p else -math.inf),
        (column * top_k).int(),
        column * top_p,
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device),
    )


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: SamplingParameters,
    may_truncate: bool,
    entry: Entry | None = None,
) -> torch.Tensor:
    """Run our op; on a GPU launched by an entry where one is given."""
    if entry is None or logits.device.type != "cuda":
        return sample_tokens(logits, slots, positions, parameters, may_truncate=may_truncate)
    from kernels.sampling.triton_kernel import sample_tokens_triton

    return sample_tokens_triton(logits, slots, positions, parameters, may_truncate, SamplingConfig(**entry))


def sampling_error(
    device: torch.device,
    num_rows: int,
    vocab_size: int,
    deviation: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    may_truncate: bool = True,
    entry: Entry | None = None,
) -> float:
    """Return the share of rows whose token differs from that of a full sort in float64."""
    logits = torch.randn(num_rows, vocab_size, device=device) * deviation
    logits[1::3] = logits[1::3].bfloat16().float()
    logits[2::3, ::2] = float("-inf")
    slots, positions = torch.randperm(num_rows, device=device), torch.randint(0, 2**40, (num_rows,), device=device)
    parameters = make_parameters(device, num_rows, top_k, top_p, min_p)
    expected = sample_tokens_reference(logits, slots, positions, parameters)
    return wrong_share(sample(logits, slots, positions, parameters, may_truncate, entry), expected)


def sampling_case(
    device: torch.device, num_rows: int, vocab_size: int, deviation: float, top_k: int = 0, top_p: float = 1.0
) -> Case:
    """One read of the logits, and a token a row."""
    num_bytes = num_rows * vocab_size * 4
    slots = torch.arange(num_rows, device=device)
    truncates = top_k > 0 or top_p < 1.0
    parameters = make_parameters(device, num_rows, top_k, top_p)

    def ours(logits: torch.Tensor, entry: Entry | None = None) -> torch.Tensor:
        return sample(logits, slots, slots, parameters, truncates, entry)

    calls: dict[str, Candidate] = {OURS: ours, "max": lambda logits: logits.amax(dim=-1)}
    unavailable = {}
    if truncates:
        try:
            draw = importlib.import_module("flashinfer").sampling.top_k_top_p_sampling_from_logits
            calls["flashinfer"] = lambda logits: draw(logits, top_k or vocab_size, top_p)
        except ImportError as error:
            unavailable["flashinfer"] = str(error)
    else:
        calls["torch.compile"] = compiled(_exponential_race)
    made = rotated(num_bytes, lambda: (torch.randn(num_rows, vocab_size, device=device) * deviation,), calls)
    return Case(num_bytes, 0, *made, unavailable)


def _exponential_race(logits: torch.Tensor) -> torch.Tensor:
    """Draw without inverting, as vLLM's plain path does."""
    probabilities = logits.softmax(dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def bitmask_error(device: torch.device, num_rows: int, vocab_size: int) -> float:
    """Return the share of logits that differ from the reference."""
    logits = torch.randn(num_rows, vocab_size, device=device)
    rows = torch.randperm(num_rows, device=device)[: num_rows // 2 + 1]
    masks = _random_masks(device, len(rows), vocab_size)
    expected = logits.clone()
    forbid_tokens_reference(expected, rows, masks)
    forbid_tokens(logits, rows, masks)
    return wrong_share(logits, expected)


def bitmask_case(device: torch.device, num_rows: int, vocab_size: int) -> Case:
    """Read the masks, and overwrite the half of the logits that they forbid."""
    num_bytes = num_rows * (vocab_size * 2 + -(-vocab_size // 32) * 4)
    where = torch.arange(num_rows, device=device), _random_masks(device, num_rows, vocab_size)
    fused = compiled(forbid_tokens_reference)
    calls = {
        OURS: lambda logits: forbid_tokens(logits, *where),
        "torch.compile": lambda logits: fused(logits, *where),
    }
    set_bytes = num_rows * vocab_size * 4
    return Case(num_bytes, 0, *rotated(set_bytes, lambda: (torch.randn(num_rows, vocab_size, device=device),), calls))


def _random_masks(device: torch.device, num_masks: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (num_masks, -(-vocab_size // 32)), device=device).int()


# Where a token weighs a millionth of the sum, a rounding of the sum moves a draw, or the nucleus, to the next one.
SAMPLING_OP = Op(sampling_error, sampling_case, 0.05)
_PEAKED_OP = replace(SAMPLING_OP, tolerance=0.02)
_CHECKED = [(0, 1.0, 0.0), (50, 1.0, 0.0), (50, 0.9, 0.0), (0, 0.9, 0.0), (3000, 0.95, 0.0), (0, 0.8, 0.01)]
# Deviation, top_k and top_p.
KINDS = {
    "plain": (_FLAT, 0, 1.0),
    "top-k top-p": (_FLAT, 50, 0.9),
    "top-p": (_PEAKED, 0, 0.9),
    "flat top-p": (_FLAT, 0, 0.9),
}


def _checked(deviation: float) -> Shapes:
    return {
        f"{rows}x{vocab} σ {deviation:g} top_k {k} top_p {p} min_p {m}": (rows, vocab, deviation, k, p, m)
        for rows, vocab in ((192, LLAMA3_8B.vocab_size), (5, 1003))
        for k, p, m in _CHECKED
    }


SAMPLING = OpSuite(
    "sampling",
    lambda device: SAMPLING_OP.checks(device, _checked(_FLAT)) + _PEAKED_OP.checks(device, _checked(_PEAKED)),
    SAMPLING_OP.cases(
        {
            f"{rows}x{vocab} {name}": (rows, vocab, *kind)
            for rows, vocab in ((128, LLAMA3_8B.vocab_size), (8, QWEN3_06B.vocab_size), (1, LLAMA3_8B.vocab_size))
            for name, kind in KINDS.items()
            if rows == 128 or name != "flat top-p"
        }
    ),
)
LOGITS_BITMASK = Op(bitmask_error, bitmask_case, 0.0).suite(
    "logits_bitmask",
    sizes((128, LLAMA3_8B.vocab_size), (3, 1003)),
    sizes((128, LLAMA3_8B.vocab_size), (8, QWEN3_06B.vocab_size)),
)
