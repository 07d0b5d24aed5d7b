"""Takes the weights of a Mamba-2 mixer from a checkpoint."""

from __future__ import annotations

from gpu_worker.layers.layer_traits import Mamba2Shape, OutputNorm
from gpu_worker.layers.layer_weights import Mamba2Weights
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.projections import Projections
from gpu_worker.models.weight_source import WeightSource
from kernels.ssd import SsdWeights


def take_mamba2(
    config: ModelConfig, checkpoint: WeightSource, projections: Projections, prefix: str, shape: Mamba2Shape
) -> Mamba2Weights:
    """Take the weights of a layer whose tensors begin with `prefix`."""
    name, sizes, hidden_size = f"{prefix}.mamba", shape.sizes, config.hidden_size
    widths = input_widths(shape)
    conv = checkpoint.take(f"{name}.conv1d.weight", sizes.num_features, 1, shape.conv_width)
    rate = checkpoint.take_float32(f"{name}.A_log", sizes.num_heads).exp()
    step_bias = checkpoint.take_float32(f"{name}.dt_bias", sizes.num_heads)
    skip = checkpoint.take_float32(f"{name}.D", sizes.num_heads)
    return Mamba2Weights(
        shape=shape,
        inputs=projections.take(
            [f"{name}.in_proj"],
            [sum(widths)],
            hidden_size,
            has_bias=shape.has_input_bias,
            scales=list(zip(widths, shape.input_scales, strict=True)),
        ),
        conv=conv[:, 0].t().contiguous(),
        conv_bias=checkpoint.take(f"{name}.conv1d.bias", sizes.num_features) if shape.has_conv_bias else None,
        ssd=SsdWeights(rate, step_bias, skip, *shape.step_limits),
        norm=None if shape.norm is OutputNorm.NONE else checkpoint.take(f"{name}.norm.weight", sizes.inner_size),
        eps=config.rms_norm_eps,
        output=projections.take(
            [f"{name}.out_proj"],
            [hidden_size],
            sizes.inner_size,
            has_bias=shape.has_output_bias,
            scales=[(hidden_size, shape.output_scale)],
        ),
    )


def input_widths(shape: Mamba2Shape) -> tuple[int, int, int, int, int]:
    """Return how many features of each kind the input projection yields, as `Mamba2Shape.input_scales` has them."""
    sizes = shape.sizes
    groups = sizes.num_groups * sizes.state_size
    return sizes.inner_size, sizes.inner_size, groups, groups, sizes.num_heads
