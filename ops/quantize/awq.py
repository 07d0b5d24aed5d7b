"""AWQ: scale input features that matter up before rounding, and their source down by as much; then clip each group.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv 2306.00978,
equations 4 and 5. Errors are those of the matrix's own product with the calibration inputs; they follow from the
inputs' second moments alone, `‖ΔW X‖² = Σ (ΔW G) ⊙ ΔW` with `G = X Xᵀ`, so no inputs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.norms import NormWeights
from kernels.linear.forms import DenseWeight
from ops.quantize.grid import QuantizedMatrix, grouped, round_to_nearest
from ops.quantize.layer_blocks import blocks, with_matrices
from ops.quantize.layer_inputs import InputMoments, LayerInputs

_NUM_EXPONENTS = 20
_MAX_SEARCH_ROWS = 2048
"""A matrix with more rows is judged by this number of them, evenly spread: one number is searched for, from 20."""

_CLIPS = tuple(1.0 - step / 20 for step in range(1, 11))


def search_scales(
    weights: Sequence[torch.Tensor], gram: torch.Tensor, magnitudes: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """Return the factor of each input feature that loses least; all ones are tried too.

    Args:
        weights: Matrices that read the same inputs.
        gram: `inputs.T @ inputs` over the calibration tokens, up to a factor.
        magnitudes: Mean absolute value of each input feature.
        bits: Of a value.
        group_size: Input features that share a scale.

    Shapes:
        weights: `[out_features, in_features]` float32 each
        gram: `[in_features, in_features]` float32
        magnitudes, result: `[in_features]` float32
    """
    weights = [weight[:: -(-len(weight) // _MAX_SEARCH_ROWS)] for weight in weights]
    best = torch.ones_like(magnitudes)
    least = sum(_loss(weight, rounded(weight, bits, group_size).dequantize(), gram) for weight in weights)
    for step in range(1, _NUM_EXPONENTS + 1):
        scales = magnitudes.clamp(min=1e-4) ** (step / _NUM_EXPONENTS)
        scales /= (scales.max() * scales.min()).sqrt()
        loss = 0.0
        for weight in weights:
            loss += _loss(weight, rounded(weight * scales, bits, group_size).dequantize() / scales, gram)
        if loss < least:
            best, least = scales, loss
    return best


def clip(weight: torch.Tensor, gram: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Limit each group's weights to the magnitude at which rounding, and limiting, lose least.

    Groups are judged alone, by the second moments of their own inputs.

    Shapes:
        weight, result: `[out_features, in_features]` float32
        gram: `[in_features, in_features]` float32
    """
    starts = range(0, weight.shape[1] + 1, group_size)
    moments = torch.stack([gram[first:last, first:last] for first, last in pairwise(starts)])
    groups = grouped(weight, group_size)
    largest = groups.abs().amax(2, keepdim=True)
    best, least = weight, _group_losses(weight, weight, moments, bits, group_size)
    for share in _CLIPS:
        clipped = groups.clamp(-largest * share, largest * share).flatten(1)
        losses = _group_losses(weight, clipped, moments, bits, group_size)
        is_better = (losses < least).repeat_interleave(group_size, dim=1)
        best, least = torch.where(is_better, clipped, best), torch.minimum(losses, least)
    return best


def rounded(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedMatrix:
    """Round to the grid that AWQ's checkpoints use, with a zero point a group."""
    return round_to_nearest(weight, bits, group_size, is_symmetric=False)


def _loss(weight: torch.Tensor, approximation: torch.Tensor, gram: torch.Tensor) -> float:
    difference = weight - approximation
    return float(torch.sum(difference @ gram * difference, dtype=torch.float64))


def _group_losses(
    weight: torch.Tensor, clipped: torch.Tensor, moments: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """Return the loss of each group, `[out_features, num_groups]`."""
    difference = grouped(weight - rounded(clipped, bits, group_size).dequantize(), group_size)
    return torch.einsum("ogi,gij,ogj->og", difference, moments, difference)


def rescale_layer(
    weights: LayerWeights, inputs: LayerInputs, bits: int, group_size: int
) -> tuple[LayerWeights, LayerInputs]:
    """Return a layer that computes the same from the same stream, and the inputs that its matrices then have.

    Normalisations take the scales of the matrices behind them, the up projection's rows those of the down projection,
    and the value rows those of the output projection where each query head has a value head of its own.
    """

    def scales(projection: Projection, moments: InputMoments) -> torch.Tensor:
        magnitudes = moments.magnitudes / moments.num_tokens
        return search_scales([projection.weight.dequantize()], moments.gram, magnitudes, bits, group_size)

    (mixer, feed_forward), norms = blocks(weights), weights.norms
    qkv, gate_up = scales(mixer.qkv, inputs.qkv), scales(feed_forward.gate_up, inputs.gate_up)
    down, shape = scales(feed_forward.down, inputs.down), mixer.shape
    has_own_values = shape.num_heads == shape.num_kv_heads
    output = scales(mixer.output, inputs.output) if has_own_values else None
    value_rows = shape.num_kv_heads * shape.head_dim
    rescaled = replace(
        weights,
        mixer=replace(mixer, qkv=_with_inputs(mixer.qkv, qkv)),
        feed_forward=replace(
            feed_forward,
            gate_up=_with_last_rows(_with_inputs(feed_forward.gate_up, gate_up), down),
            down=_with_inputs(feed_forward.down, down),
        ),
        norms=replace(
            norms,
            before_mixer=_divided(norms.before_mixer, qkv),
            before_feed_forward=_divided(norms.before_feed_forward, gate_up),
        ),
    )
    moments = LayerInputs(
        inputs.qkv.scaled(1 / qkv), inputs.output, inputs.gate_up.scaled(1 / gate_up), inputs.down.scaled(1 / down)
    )
    if output is None:
        return rescaled, moments
    assert len(output) == value_rows
    matrices = {"qkv": _with_last_rows(blocks(rescaled)[0].qkv, output), "output": _with_inputs(mixer.output, output)}
    return with_matrices(rescaled, matrices), replace(moments, output=inputs.output.scaled(1 / output))


def _divided(norm: NormWeights | None, scales: torch.Tensor) -> NormWeights:
    assert norm is not None
    return replace(norm, weight=norm.weight / scales)


def _with_inputs(projection: Projection, scales: torch.Tensor) -> Projection:
    """Return a projection of inputs that were divided by `scales`."""
    return replace(projection, weight=DenseWeight(projection.weight.dequantize() * scales))


def _with_last_rows(projection: Projection, scales: torch.Tensor) -> Projection:
    """Return a projection whose last results are divided by `scales`."""
    divisors = torch.ones(projection.weight.shape[0], device=scales.device)
    divisors[-len(scales) :] = scales
    bias = None if projection.bias is None else projection.bias / divisors
    return replace(projection, weight=DenseWeight(projection.weight.dequantize() / divisors[:, None]), bias=bias)
