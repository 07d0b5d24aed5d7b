"""Layers with a state of fixed size: the short convolution and the state update of one layer, decodes and prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.causal_conv import causal_conv
from kernels.causal_conv.dispatch import causal_conv_reference
from kernels.gated_delta import DeltaSizes, DeltaWeights, gated_delta
from kernels.gated_delta.reference import gated_delta_chunked, gated_delta_reference
from kernels.matrix_state.walk import StateStep
from kernels.ssd import SsdSizes, SsdWeights, ssd
from kernels.ssd.reference import ssd_chunked, ssd_reference
from kernels.state_rows import StateRows
from ops.bench.gpu.case import OURS, Candidate, Case, Clock, Op, relative_error, rotated

_CONV_WIDTH = 4
_IN_TORCH = "torch, in chunks"


Sizes = SsdSizes | DeltaSizes
# Of one layer, from the models' published configurations.
MODELS: dict[str, Sizes] = {
    "Falcon-H1-1.5B": SsdSizes(48, 64, 1, 256),
    "Nemotron-H-8B": SsdSizes(128, 64, 8, 128),
    "Qwen3-Next-80B-A3B": DeltaSizes(16, 32, 128, 128),
}
_TINY: dict[str, Sizes] = {"tiny SSD": SsdSizes(6, 33, 2, 20), "tiny delta": DeltaSizes(2, 4, 20, 33)}


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """Sequences of a step, each with a slot of its own, and all that one layer needs of them."""

    sizes: Sizes
    features: torch.Tensor
    gates: torch.Tensor
    conv: torch.Tensor
    of_heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    inputs: torch.Tensor
    states: torch.Tensor
    rows: StateRows

    def update(self, form: Callable[..., torch.Tensor], convolve: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Run the layer by some form of its update and of the convolution before it."""
        mixed = convolve(self.features, self.conv, None, self.inputs, self.rows)
        is_ssd = isinstance(self.sizes, SsdSizes)
        weights = SsdWeights(*self.of_heads) if is_ssd else DeltaWeights(*self.of_heads[:2])
        return form(StateStep(mixed, self.gates, weights, self.sizes, self.states, self.rows))


def make_recurrent_batch(device: torch.device, sizes: Sizes, num_seqs: int, num_new: int) -> RecurrentBatch:
    """Make sequences with a context, each with `num_new` tokens in the step."""
    num_tokens, features = num_seqs * num_new, sizes.num_features
    heads, *_ = sizes.state_shape

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, device=device).to(dtype)

    of_heads = (torch.rand(heads, device=device) + 0.1, normal(heads, dtype=torch.float32))
    return RecurrentBatch(
        sizes,
        normal(num_tokens, features),
        normal(num_tokens, sizes.num_gates),
        normal(_CONV_WIDTH, features) * 0.5,
        (*of_heads, torch.ones(heads, device=device)),
        normal(num_seqs, _CONV_WIDTH - 1, features, dtype=torch.float32),
        normal(num_seqs, *sizes.state_shape, dtype=torch.float32) * 0.1,
        StateRows(
            torch.randperm(num_seqs, device=device),
            torch.arange(0, num_tokens + 1, num_new, dtype=torch.int32, device=device),
            torch.full((num_seqs,), 100 + num_new, dtype=torch.int32, device=device),
            num_new,
        ),
    )


def _forms(sizes: Sizes) -> tuple[Callable[..., torch.Tensor], ...]:
    if isinstance(sizes, SsdSizes):
        return ssd, ssd_chunked, ssd_reference
    return gated_delta, gated_delta_chunked, gated_delta_reference


def recurrent_error(device: torch.device, sizes: Sizes, num_seqs: int, num_new: int) -> float:
    """Compare results, and the states behind them, with the reference."""
    batch = make_recurrent_batch(device, sizes, num_seqs, num_new)
    inputs, states = batch.inputs.clone(), batch.states.clone()
    ours, _, reference = _forms(sizes)
    result, kept = batch.update(ours, causal_conv), batch.states.clone()
    batch.inputs.copy_(inputs)
    batch.states.copy_(states)
    expected = batch.update(reference, causal_conv_reference)
    return max(relative_error(result, expected), relative_error(kept, batch.states))


def recurrent_case(device: torch.device, sizes: Sizes, num_seqs: int, num_new: int) -> Case:
    """Read and write each sequence's state once, and its tokens' features."""
    heads, rows, columns = sizes.state_shape
    features, num_tokens = sizes.num_features, num_seqs * num_new
    state_bytes = 4 * num_seqs * (heads * rows * columns + (_CONV_WIDTH - 1) * features)
    token_bytes = 2 * num_tokens * (features + sizes.num_gates + heads * columns)
    ours, chunked, _ = _forms(sizes)
    calls: dict[str, Candidate] = {OURS: lambda batch: batch.update(ours, causal_conv)}
    if num_new > 1:
        calls[_IN_TORCH] = lambda batch: batch.update(chunked, causal_conv_reference)
    # A product of a token with a state, to read it, and another to write it.
    num_flops = 4 * num_tokens * heads * rows * columns
    clocks = {_IN_TORCH: Clock.EVENTS} if num_new > 1 else {}
    made = rotated(state_bytes, lambda: (make_recurrent_batch(device, sizes, num_seqs, num_new),), calls)
    return Case(2 * state_bytes + token_bytes, num_flops, *made, clocks=clocks)


RECURRENT = Op(recurrent_error, recurrent_case, 1e-2).suite(
    "recurrent",
    {
        f"{name} {seqs} x {new}": (sizes, seqs, new)
        for name, sizes in (_TINY | MODELS).items()
        for seqs, new in ((5, 1), (2, 77))
    },
    {
        f"{name} {seqs} x {new}": (sizes, seqs, new)
        for name, sizes in MODELS.items()
        for seqs, new in ((1, 1), (64, 1), (256, 1), (1, 4096), (8, 512))
    },
)
