"""AWQ's scales in a decoder layer: what is scaled up at a matrix's input is scaled down where the input comes from."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.norms import NormWeights
from kernels.linear.forms import DenseWeight
from ops.quantize.awq import search_scales
from ops.quantize.layer_blocks import blocks, with_matrices
from ops.quantize.layer_inputs import InputMoments, LayerInputs


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
