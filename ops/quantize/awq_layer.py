"""AWQ's scales in a decoder layer: what is scaled up at a matrix's input is scaled down where the input comes from."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_worker.layers.layer_weights import LayerWeights, Projection
from kernels.linear.forms import DenseWeight
from ops.quantize.awq import search_scales
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

    qkv, gate_up = scales(weights.qkv, inputs.qkv), scales(weights.gate_up, inputs.gate_up)
    down, shape = scales(weights.down, inputs.down), weights.shape
    has_own_values = shape.num_heads == shape.num_kv_heads
    output = scales(weights.output, inputs.output) if has_own_values else None
    value_rows = shape.num_kv_heads * shape.head_dim
    assert weights.attention_norm is not None
    rescaled = replace(
        weights,
        attention_norm=weights.attention_norm / qkv,
        qkv=_with_inputs(weights.qkv, qkv),
        mlp_norm=weights.mlp_norm / gate_up,
        gate_up=_with_last_rows(_with_inputs(weights.gate_up, gate_up), down),
        down=_with_inputs(weights.down, down),
    )
    moments = LayerInputs(
        inputs.qkv.scaled(1 / qkv), inputs.output, inputs.gate_up.scaled(1 / gate_up), inputs.down.scaled(1 / down)
    )
    if output is None:
        return rescaled, moments
    assert len(output) == value_rows
    rescaled = replace(rescaled, qkv=_with_last_rows(rescaled.qkv, output), output=_with_inputs(weights.output, output))
    return rescaled, replace(moments, output=inputs.output.scaled(1 / output))


def _with_inputs(projection: Projection, scales: torch.Tensor) -> Projection:
    """Return a projection of inputs that were divided by `scales`."""
    return Projection(DenseWeight(projection.weight.dequantize() * scales), projection.bias)


def _with_last_rows(projection: Projection, scales: torch.Tensor) -> Projection:
    """Return a projection whose last results are divided by `scales`."""
    divisors = torch.ones(projection.weight.shape[0], device=scales.device)
    divisors[-len(scales) :] = scales
    bias = None if projection.bias is None else projection.bias / divisors
    return Projection(DenseWeight(projection.weight.dequantize() / divisors[:, None]), bias)
