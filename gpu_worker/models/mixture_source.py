"""Takes the weights of a mixture of experts from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_worker.layers.layer_weights import MixtureWeights, Projection, SharedExpertWeights
from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.models.experts import take_experts
from gpu_worker.models.projections import Projections

_CHOICE_BIAS = "e_score_correction_bias"
_SCALES = ("weight_scale", "weight_scale_inv")


def take_mixture(projections: Projections, layer: str, shape: MixtureShape, hidden_size: int) -> MixtureWeights:
    """Take the mixture of a layer.

    Args:
        projections: The checkpoint, and how its linear layers are quantized.
        layer: The layer's name, `model.layers.3`.
        shape: Of the mixture.
        hidden_size: Features of the residual stream.

    Raises:
        Exception: What the source's `error` makes: a tensor is missing, malformed or not supported.
    """
    has = projections.source.has
    routers = [f"{layer}.{name}" for name in shape.names.router]
    router = next((name for name in routers if has(f"{name}.weight")), routers[0])
    rule = shape.rule
    if shape.has_choice_bias:
        # What chooses among scores that differ little must not be rounded with the other weights.
        rule = replace(rule, bias=_take_choice_bias(projections, layer, router, shape))
    gate_up, down = take_experts(projections, shape, layer, shape.latent_size or hidden_size)
    return MixtureWeights(
        router=_plain_where_stored_so(projections, router).take(
            [router], [shape.num_experts], hidden_size, has_bias=shape.has_router_bias
        ),
        rule=rule,
        gate_up=gate_up,
        down=down,
        activation=shape.activation,
        shared=_take_shared(projections, layer, shape, hidden_size) if shape.shared_size else None,
        weighs_inputs=shape.weighs_inputs,
        scales=projections.source.take_float32(f"{layer}.{shape.scales}", shape.num_experts) if shape.scales else None,
        latent=_take_latent(projections, layer, shape, hidden_size) if shape.latent_size else None,
    )


def _take_latent(
    projections: Projections, layer: str, shape: MixtureShape, hidden_size: int
) -> tuple[Projection, Projection]:
    """Take the projections between the stream and what experts are given."""
    sizes, (down, up) = (shape.latent_size, hidden_size), (f"{layer}.{name}" for name in shape.names.latent)
    has_bias = shape.has_latent_biases
    return (
        projections.take([down], [sizes[0]], sizes[1], has_bias=has_bias),
        projections.take([up], [sizes[1]], sizes[0], has_bias=has_bias),
    )


def _take_choice_bias(projections: Projections, layer: str, router: str, shape: MixtureShape) -> torch.Tensor:
    names = shape.names
    name = f"{router}.{_CHOICE_BIAS}" if names.choice_bias is None else f"{layer}.{names.choice_bias}"
    row = (1,) if names.is_choice_bias_row else ()
    return projections.source.take_float32(name, *row, shape.num_experts).view(shape.num_experts)


def _take_shared(projections: Projections, layer: str, shape: MixtureShape, hidden_size: int) -> SharedExpertWeights:
    """Take the expert of all tokens."""
    names, inner = shape.names, shape.shared_size
    *both, down = (f"{layer}.{names.shared}.{name}" for name in names.shared_matrices)
    rows = shape.activation.num_projections * inner // len(both)
    gate_up = projections.take(both, [rows] * len(both), hidden_size, has_bias=shape.has_shared_biases)
    gate: Projection | None = None
    if shape.has_shared_gate:
        scores = f"{layer}.{names.shared_gate}"
        gate = _plain_where_stored_so(projections, scores).take([scores], [1], hidden_size)
    scales = [(hidden_size, shape.shared_scale)]
    outer = projections.take([down], [hidden_size], inner, has_bias=shape.has_shared_biases, scales=scales)
    return SharedExpertWeights(gate_up, outer, gate)


def _plain_where_stored_so(projections: Projections, name: str) -> Projections:
    """Return what takes a router, which most tools leave alone without saying so: it is no linear layer to them."""
    has = projections.source.has
    is_quantized = not has(f"{name}.weight") or any(has(f"{name}.{scales}") for scales in _SCALES)
    return projections if is_quantized else replace(projections, quantized=None)
